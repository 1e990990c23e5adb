"""Processes of one program: how they start and end, and how they reach each other.

Parents and children:

    supervisor.py      child processes: they start together, and are ready together
    child_process.py   one of them, as its parent sees it
    failures.py        which has failed first, and why
    child.py           what a child does: it reports, beats, and ends with its parent
    limits.py          bounds the time and the memory of what a stranger has written

Between them:

    queues.py          queues of messages, of any type
    addresses.py       where the queues of a server are, and which process has a request
    private_folder.py  the folder of their sockets
    shared_numbers.py  numbers that several processes change

It knows which processes a server has, and not what they do: a child's body is a name. Read
`supervisor.py` and `child.py`.
"""

__all__: list[str] = []
