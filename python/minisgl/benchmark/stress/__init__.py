"""Attacks and long load on a running server, and their effects on its clients.

    target.py      the server, as a client sees it
    watch.py       /health, another client's stream and memory, during an attack
    bodies.py      costly bodies: the largest legal ones, and the worst illegal ones
    attacks.py     the attacks by their names
    processes.py   a server's processes on this machine: start, names, end
    mix.py         random requests of every kind
    asks.py        a request, and the checks of its answer
    events.py      whether a stream is well formed and has exactly one end
    clients.py     clients that send this mix, check the answers, and hang up now and then
    samples.py     memory, descriptors and threads of processes, over time
    trends.py      whether such a number grows
    proxy.py       a minimal reverse proxy

An attack needs nothing but the standard library, so that it can run in a process of its own.
"""

__all__: list[str] = []
