"""RAM of a server's processes beside weights, KV and buffers, as measured (docs/explanation/planner.md).

A machine with several models pays for the libraries and the front once, and for each model for a server.
"""

from __future__ import annotations

from typing import Final

# Code of Python, torch and other libraries: the kernel keeps one copy for all processes that map them.
LIBRARIES_BYTES: Final = 104 << 20
# One model's launcher, zygote, httpserver, weights, router, detokenizer, worker and template processes, and the grammar
# process, which the first constrained answer starts; without the libraries' code. Pages that forked processes share
# count once.
SERVER_BYTES: Final = 323 << 20
# Of each token: the tokenizers of httpserver, detokenizer, worker and grammar process.
VOCABULARY_BYTES: Final = 2150
# The front process of a server with several models, its launcher and their watchdog.
FRONT_BYTES: Final = 106 << 20
# RAM of a server with several models before any is loaded.
COMMON_BYTES: Final = FRONT_BYTES + LIBRARIES_BYTES
