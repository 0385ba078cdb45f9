"""Work on untrusted input (a chat template, a grammar) in a process of its own that is killed when it takes too long.

`Sandbox` is the parent's side, `child` the process's, `frames` the line between them.
"""
