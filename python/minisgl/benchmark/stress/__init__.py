"""Attacks and long load on a running server, and what its clients see of them.

    target.py      the server, as a client has it
    watch.py       /health, a neighbour's stream and memory, while something happens
    bodies.py      bodies that cost much: the largest legal ones, and the worst illegal ones
    attacks.py     the attacks by their names
    processes.py   a server's processes on this machine: start, names, end
    mix.py         random requests of every kind
    asks.py        a request, and what its answer must be
    events.py      whether a stream is well formed and has exactly one end
    clients.py     clients that send this mix, check what comes, and hang up
    samples.py     memory, descriptors and threads of processes, over time
    trends.py      whether such a number grows
    proxy.py       the plainest reverse proxy

An attack needs nothing but the standard library, so that it can run in a process of its own.
"""

__all__: list[str] = []
