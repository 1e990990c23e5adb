"""Processes of one program: how they start and end, and how they reach each other.

Parents and children:

    supervisor.py      child processes: they start together, and are ready together
    child_process.py   one of them, as its parent sees it
    failures.py        which child has failed first, and why
    child.py           what a child does: it reports, beats, and ends with its parent
    limits.py          limits of time and memory for untrusted input

Between them:

    queues.py          queues of messages, of any type
    addresses.py       where the queues of a server are, and which process has a request
    private_folder.py  the folder of their sockets
    shared_numbers.py  numbers that several processes change

Knows which processes a server has, but not what they do: the function that a child runs is given
by its name. Read
`supervisor.py` and `child.py`.
"""

__all__: list[str] = []
