"""Attacks on a running server, and what its other clients see of them.

    target.py    the server, as a client has it
    watch.py     /health, a neighbour's stream and memory, while something happens
    bodies.py    bodies that cost much: the largest legal ones, and the worst illegal ones
    attacks.py   the attacks by their names

An attack needs nothing but the standard library, so that it can run in a process of its own.
"""

__all__: list[str] = []
