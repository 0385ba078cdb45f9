"""Processes untrusted input (chat templates, grammars) in a separate process, which is killed if it takes too long.

`Sandbox` is the parent's side, `child` the sandboxed process's side, `frames` the protocol between them.
"""
