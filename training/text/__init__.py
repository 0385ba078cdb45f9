"""What the packaged model learns from: conversations made by chance from templates and word lists.

    words.py        the word lists, and words that nobody has seen before
    example.py      one thing to learn: a conversation, what to think and what to answer
    arithmetic.py   sums, differences and their word problems
    reading.py      questions about a text in the prompt
    stories.py      short stories
    smalltalk.py    who it is, what it can do, and that it knows nothing else
    requests.py     what users ask of tools, and the tools' definitions
    tools.py        calls of tools, and answers from what they returned
    mixture.py      how much of each

Everything is a function of a `random.Random`, so a seed is a text.
"""
