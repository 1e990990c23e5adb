"""All HTTP connections of a process: which are served, and in which order they are handled.

Below the limit a connection is *served*. Above it, it is *reserved* for a health check. When all
reserved ones are taken, a new one ends the oldest, so that silent clients cannot keep health checks
away.

An iteration ("turn") of the event loop parses or ends two connections, and parses two health
checks, which have a queue of their own. The others wait, unread, in order of arrival. So even many
clients that send or hang up at once delay neither health checks nor the streams of others. Next to
read: `connection.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.capacity import NUM_RESERVED
from minisgl.server.frontend import Frontend
from minisgl.server.http.handover import Handover
from minisgl.server.http.loop_turns import TurnQueue
from minisgl.server.places import Places

logger = logging.getLogger(__name__)

# Per turn, so that a turn is short: a request that is refused or hung up costs 1 or 2 ms.
RUNS_A_TURN = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """
    Args:
        max_connections: those that are served, by all API processes; above them only /health is
            answered.
        header_timeout_s: how long the head of a request may take, from the connection's start or
            the head's first byte.
    """

    max_connections: int
    header_timeout_s: float


class ConnectionTable:
    """The open connections: served ones up to the limit, and reserved ones above it.

    Attributes:
        health_turns: the work of connections that ask for /health.
        other_turns: the work of all others, and the ends of connections.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        frontend: Frontend,
        shared: SharedNumbers,
        handover: Handover | None = None,
    ) -> None:
        self.limits = limits
        self.metrics = frontend.metrics
        self.acceptance = frontend.acceptance
        self.health_turns = TurnQueue(RUNS_A_TURN)
        self.other_turns = TurnQueue(RUNS_A_TURN)
        self._places = Places("connections", limits.max_connections, shared)
        self._served: set[H11Protocol] = set()
        self._reserved: dict[H11Protocol, None] = {}  # the oldest first
        self._handover = handover

    def add(self, connection: H11Protocol) -> bool:
        """Add a connection and say whether it is reserved. May abort the oldest reserved one."""
        if self._places.try_take(1):
            self._served.add(connection)
            return False
        logger.warning(
            "%d connections are open, which is the limit; one more gets an answer to /health only "
            "(--max-connections)",
            self.limits.max_connections,
        )
        if len(self._reserved) == NUM_RESERVED:
            oldest = next(iter(self._reserved))
            del self._reserved[oldest]
            oldest.transport.abort()
        self._reserved[connection] = None
        return True

    def discard(self, connection: H11Protocol) -> None:
        self._reserved.pop(connection, None)
        if connection in self._served:
            self._served.remove(connection)
            self._places.give_back(1)
        if self._handover is not None:
            self._handover.end_one()
