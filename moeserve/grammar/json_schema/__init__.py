"""Rewrites a client's JSON Schema for llguidance, which enforces it.

references.py    what `$ref` points to
keywords.py      which keywords hold schemas, and which are annotations
named.py         the property names that the schemas of one value describe
disjoint.py      whether two alternatives of `oneOf` can hold at once
enforced.py      the schema that llguidance gets
faults.py        where in a schema the cause of an error lies
"""
