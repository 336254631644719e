"""Fuzzers: seeded generators of hostile bytes, messages, files and requests. Only typed errors may come of them.

`python -m tests.fuzz --minutes 30` runs all of them and prints counts; a short slice of each is part of the tests. An
example is named by its target, seed and number, and can be made again.
"""
