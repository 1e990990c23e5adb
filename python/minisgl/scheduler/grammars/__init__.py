"""Structured output: the grammars of requests, and how far their answers have come in them.

    pending.py       requests that wait until their grammar is tried and compiled
    known.py         grammars that were tried, and what they take
    budget.py        which are forgotten when they take too much
    matchers.py      grammar masks before a token, this rank's matches after it
    mask_threads.py  threads that make masks, and what they take for it
    progress.py      how sampled tokens advance matches, on all ranks alike; forced tokens

`minisgl.grammar` compiles one grammar and tries it in another process. Here is which ones, when,
and what they do to requests. Read `matchers.py`, then `progress.py`.
"""

__all__: list[str] = []
