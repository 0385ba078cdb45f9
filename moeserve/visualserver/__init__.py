"""The visual server: from pictures to the embeddings that stand for them in a prompt.

    messages    httpserver sends pictures as clients have sent them, and gets embeddings by their files' names
    decoding    an untrusted picture is decoded and resized in a sandboxed process (`decode_process.py`)
    towers/     the network that reads pixels, from the model's `mmproj` GGUF

The process runs only where a model has a tower. It is not on the path of a token: when it is lost, requests whose
pictures it had wait for the next one, and all others go on.
"""
