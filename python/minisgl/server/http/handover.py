"""Gives connections to the API process that has the fewest.

All API processes accept connections from one socket. Those that come first would take most of a
burst, and clients that keep their connections would keep these processes busier than the others. So
a process that accepts a connection sends it to the one with the fewest, over a pair of sockets.

Every process can receive what was sent to any. So connections that were on their way to one that
hangs are served by others, once it has given no beat for two seconds.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minisgl.processes.shared_numbers import SharedNumbers

BEAT_INTERVAL_S = 0.5
_BEATS_FOR_S = 2.0  # after its last beat, a process that hangs gets no connections
_RECEIVED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Entrance:
    """How connections come to an API process.

    Attributes:
        api: which process it is.
        listener: the socket that all of them accept connections from.
        incoming: by process, where it gets connections that others have accepted.
        outgoing: by process, what leads to its socket of `incoming`.
    """

    api: int
    listener: socket.socket
    incoming: list[socket.socket]
    outgoing: list[socket.socket]


def make_entrances(listener: socket.socket, num_processes: int) -> list[Entrance]:
    """
    Raises:
        OSError: no descriptor is left.
    """
    # A datagram is whole, and a pair takes more of them than a socket with an address does.
    pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(num_processes)]
    incoming = [receiver for receiver, _ in pairs]
    outgoing = [sender for _, sender in pairs]
    return [Entrance(api, listener, incoming, outgoing) for api in range(num_processes)]


class Handover:
    """The connections of all API processes, counted, and the way from one process to another.

    Args:
        entrance: of this process.
        shared: numbers that all of them share.
        clock: seconds, the same for all of them.
    """

    def __init__(
        self,
        entrance: Entrance,
        shared: SharedNumbers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = entrance.api
        self._incoming = entrance.incoming
        self._outgoing = entrance.outgoing
        for pipe in (*self._incoming, *self._outgoing):
            pipe.setblocking(False)
        self._clock = clock
        self._shared = shared
        # Of each process: its connections, and until when it gets those of others.
        self._num_open = shared.array("connections-of-each", len(self._outgoing))
        self._serves_until = shared.array("api-processes-serve-until", len(self._outgoing))

    def beat(self) -> None:
        """Say that this process serves. It gets connections of others for the next two seconds.

        Without a descriptor for one it gets none.
        """
        try:
            os.close(os.dup(self.fileno()))
        except OSError:
            self._get_none()
            return
        with self._shared.locked():
            self._serves_until[self._api] = self._clock() + _BEATS_FOR_S

    def _get_none(self) -> None:
        """Until the next beat."""
        with self._shared.locked():
            self._serves_until[self._api] = 0

    def close(self) -> None:
        """Get none any more. Those that are on their way are for others, or closed if all end."""
        self._get_none()
        for pipe in (*self._incoming, *self._outgoing):
            pipe.close()

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._incoming[self._api].fileno()

    def keeps(self, connection: socket.socket) -> bool:
        """Count a connection that was accepted, and send it to the process with the fewest.

        Returns:
            whether this process has it; it also has what another one cannot take now.
        """
        with self._shared.locked():
            api = self._process_with_fewest()
            self._num_open[api] += 1
        if api == self._api:
            return True
        descriptors = array("i", [connection.fileno()])
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
        try:
            self._outgoing[api].sendmsg([b"\0"], [rights])
        except OSError:  # its queue is full
            self._take_over(api)
            return True
        return False

    def _process_with_fewest(self) -> int:
        """This one, if it is among several."""
        serving = [api for api in range(len(self._outgoing)) if self._serves(api)]
        return min([self._api, *serving], key=self._num_open.__getitem__)

    def _serves(self, api: int) -> bool:
        return self._clock() < self._serves_until[api]

    def _take_over(self, api: int) -> None:
        """Count a connection of another process as one of this process."""
        with self._shared.locked():
            self._num_open[api] -= 1
            self._num_open[self._api] += 1

    def received(self) -> Iterator[socket.socket]:
        """Connections that others have sent, at most a few at a time."""
        return self._received_for(self._api)

    def left_by_others(self) -> Iterator[socket.socket]:
        """Those that were sent to a process that does not serve now, at most a few at a time."""
        for api in range(len(self._incoming)):
            if self._serves(self._api) and not self._serves(api):
                yield from self._received_for(api)

    def _received_for(self, api: int) -> Iterator[socket.socket]:
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                _, descriptors, _, _ = socket.recv_fds(self._incoming[api], 1, 1)
            except BlockingIOError:
                return
            if api != self._api:
                self._take_over(api)
            if descriptors:
                yield socket.socket(fileno=descriptors[0])
            else:  # this process has no descriptor left, so the connection is closed
                self._get_none()  # or it would have the fewest, and get all others too
                self.end_one()

    def end_one(self) -> None:
        """Count the end of a connection of this process."""
        with self._shared.locked():
            self._num_open[self._api] -= 1
