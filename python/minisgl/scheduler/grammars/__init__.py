"""Structured output: the grammars of requests, and how far their answers have come in them.

    pending.py       requests that wait until their grammar is tried and compiled
    known.py         grammars that were tried, and the memory that they take
    budget.py        which grammars are forgotten when they take too much memory
    matchers.py      grammar masks before a token, this rank's matches after it
    mask_threads.py  threads that make masks, and the memory that they take
    progress.py      how sampled tokens advance matches, on all ranks alike; forced tokens

`minisgl.grammar` tries and compiles one grammar. This package decides which grammars, when, and
what follows for requests. Read `matchers.py`, then `progress.py`.
"""

__all__: list[str] = []
