"""Answers that must match a grammar, compiled by llguidance against the model's vocabulary.

    spec.py        GrammarSpec: what a client can ask for
    json_schema/   a client's JSON Schema as it is enforced
    translate.py   its translation to llguidance's notation
    engine.py      the vocabulary as llguidance sees it, and matchers: which token may come next
    checker.py     httpserver's side: compiles every spec first in a process that can be killed (check_process.py)

The worker (worker/constraints/slot_guides.py) compiles what the checker has accepted, with the same limits.
"""
