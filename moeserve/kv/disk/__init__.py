"""The prefix cache's disk tier: pages of KV in append-only files.

segment.py      one pair of files: pages, and one index record per page
store.py        all segments, within a budget of bytes; the least recently used segment is deleted first
directory.py    the folder: private, and locked by one server at a time
fingerprint.py  the properties that make pages of two servers interchangeable

Pages are verified when they are read: each checksum covers the page and its key, and the key identifies all tokens
up to the page's end.
"""
