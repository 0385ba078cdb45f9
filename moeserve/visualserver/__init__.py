"""The visual server: turns pictures into the embeddings that stand for them in a prompt.

    messages    httpserver sends each picture as the client sent it, and gets the name of a file of embeddings
    decoding    an untrusted picture is decoded and resized in a sandboxed process (`decode_process.py`)
    towers/     the networks that read pixels; the weights are in the model's `mmproj` GGUF

The process runs only if the model has a vision tower. No token passes through it. When it is lost, the requests whose
pictures it was encoding wait for its replacement, and all other requests continue.
"""
