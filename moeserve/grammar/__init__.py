"""Answers that must match a grammar: what a client asks for, compiled by llguidance against the model's vocabulary.

    wish.py        what can be asked for, and its way into llguidance's notation
    engine.py      the vocabulary as llguidance sees it, and matchers: which token may come next
    checker.py     httpserver's side: every wish is compiled first in a process that can be killed (check_process.py)

The worker (worker/constraints.py) compiles what the checker has passed, with the same limits.
"""
