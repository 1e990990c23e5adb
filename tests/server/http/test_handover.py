"""Connections of several API processes: here two or three servers in one event loop."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn

from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.http.connection_table import ConnectionLimits
from minisgl.server.http.handover import BEAT_INTERVAL_S, Entrance, Handover, make_entrances
from minisgl.server.http.listener import create_server
from tests.server.harness import run, running_app, wait_until

LATE_S = 100
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Servers:
    """Servers that accept connections from one socket.

    Attributes:
        others: the processes that do not serve.
        clients: their connections.
    """

    def __init__(
        self, servers: list[uvicorn.Server], others: list[Handover], address: tuple[str, int]
    ) -> None:
        self._servers = servers
        self.others = others
        self._address = address
        self.clients: list[Client] = []

    @property
    def num_open(self) -> list[int]:
        return [len(server.server_state.connections) for server in self._servers]

    def clients_of(self, index: int) -> list[Client]:
        """Those that a server serves."""
        connections = self._servers[index].server_state.connections
        addresses = {each.transport.get_extra_info("peername") for each in connections}
        return [each for each in self.clients if each[1].get_extra_info("sockname") in addresses]

    async def connect(self, number: int) -> None:
        """Open connections at once, and wait until all of them are served."""
        opened = [asyncio.open_connection(*self._address) for _ in range(number)]
        self.clients += await asyncio.gather(*opened)
        await wait_until(lambda: sum(self.num_open) == len(self.clients))

    async def close(self, clients: list[Client]) -> None:
        for client in clients:
            client[1].close()
            self.clients.remove(client)
        await wait_until(lambda: sum(self.num_open) == len(self.clients))


@asynccontextmanager
async def serving(folder: Path, num_servers: int, num_processes: int) -> AsyncIterator[Servers]:
    """Servers of some of the processes; the last ones do not serve."""
    shared = SharedNumbers(folder, num_processes)
    async with running_app() as app:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            entrances = make_entrances(listener, num_processes)
            servers = [
                create_server(
                    app.app,
                    ConnectionLimits(100, LATE_S),
                    LATE_S,
                    shared,
                    Handover(copy_of(entrance), shared),
                )
                for entrance in entrances[:num_servers]
            ]
            tasks = [asyncio.create_task(server.serve([listener.dup()])) for server in servers]
            await wait_until(lambda: all(server.started for server in servers))
            others = [Handover(copy_of(each), shared) for each in entrances[num_servers:]]
            made = Servers(servers, others, listener.getsockname())
            yield made
            await made.close(list(made.clients))
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)
            for other in others:
                other.close()
            close_pipes(entrances)


def copy_of(entrance: Entrance) -> Entrance:
    """An entrance whose sockets are its own, as each process has them."""
    return replace(
        entrance,
        incoming=[pipe.dup() for pipe in entrance.incoming],
        outgoing=[pipe.dup() for pipe in entrance.outgoing],
    )


def close_pipes(entrances: list[Entrance]) -> None:
    for pipe in (*entrances[0].incoming, *entrances[0].outgoing):
        pipe.close()


def run_served(
    folder: Path,
    scenario: Callable[[Servers], Awaitable[None]],
    num_servers: int = 2,
    num_processes: int | None = None,
) -> None:
    async def served() -> None:
        async with serving(folder, num_servers, num_processes or num_servers) as servers:
            await scenario(servers)

    run(served())


async def answer(client: Client) -> bytes:
    """The first line of the answer to a request."""
    reader, writer = client
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b"\r\n")[0]


@pytest.mark.parametrize("at_once", [1, 12])
def test_each_process_has_as_many_connections_as_the_others(at_once: int, tmp_path: Path) -> None:
    async def scenario(servers: Servers) -> None:
        for _ in range(12 // at_once):
            await servers.connect(at_once)
        assert servers.num_open == [4, 4, 4]
        for client in servers.clients:
            assert await answer(client) == b"HTTP/1.1 200 OK"

    run_served(tmp_path, scenario, num_servers=3)


def test_new_connections_go_where_some_have_ended(tmp_path: Path) -> None:
    async def scenario(servers: Servers) -> None:
        await servers.connect(8)
        await servers.close(servers.clients_of(0))
        assert servers.num_open == [0, 4]
        await servers.connect(4)
        assert servers.num_open == [4, 4]

    run_served(tmp_path, scenario)


def test_a_process_that_does_not_serve_gets_no_connections(tmp_path: Path) -> None:
    async def scenario(servers: Servers) -> None:
        await servers.connect(5)
        assert servers.num_open == [5]
        assert await answer(servers.clients[-1]) == b"HTTP/1.1 200 OK"

    run_served(tmp_path, scenario, num_servers=1, num_processes=2)


def test_a_server_serves_what_was_on_its_way_to_a_process_that_ends(tmp_path: Path) -> None:
    async def scenario(servers: Servers) -> None:
        (other,) = servers.others
        other.beat()
        connecting = asyncio.create_task(servers.connect(20))
        await wait_until(lambda: servers.num_open[0] > 0)
        other.close()
        await connecting
        assert servers.num_open == [20]
        for client in servers.clients:
            assert await answer(client) == b"HTTP/1.1 200 OK"

    run_served(tmp_path, scenario, num_servers=1, num_processes=2)


def test_what_another_process_does_not_receive_stays_here(tmp_path: Path) -> None:
    """Its queue takes some; then this process keeps all."""
    shared = SharedNumbers(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entrances = make_entrances(listener, 2)
        here, other = [Handover(copy_of(entrance), shared) for entrance in entrances]
        here.beat()
        other.beat()
        assert here.keeps(listener), "of equal numbers"
        kept = [here.keeps(listener) for _ in range(3000)]
        assert not kept[0], "the other one has fewer"
        assert all(kept[-500:]), "its queue is full"
        received = [connection for _ in kept for connection in other.received()]
        assert len(received) == kept.count(False)
        for opened in (*received, here, other):
            opened.close()
        close_pipes(entrances)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_process_that_has_ended_or_hangs_gets_no_connections(
    has_ended: bool, tmp_path: Path
) -> None:
    shared = SharedNumbers(tmp_path, 2)
    now = 10.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entrances = make_entrances(listener, 2)
        here, other = [
            Handover(copy_of(entrance), shared, clock=lambda: now) for entrance in entrances
        ]
        here.beat()
        other.beat()
        assert [here.keeps(listener) for _ in range(3)] == [True, False, True]
        if has_ended:
            other.close()
            other.end_one()  # the connection that it had
        else:
            now += 2 * BEAT_INTERVAL_S
            assert not here.keeps(listener), "it has fewer, and was only slow"
            now += 10 * BEAT_INTERVAL_S
        assert all(here.keeps(listener) for _ in range(5))
        if not has_ended:
            other.beat()
            assert not here.keeps(listener), "it works again"
            other.close()
        here.close()
        close_pipes(entrances)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_a_descriptor_loses_no_connections_but_those_on_their_way(
    tmp_path: Path,
) -> None:
    """It does not attract all others because it has the fewest."""
    shared = SharedNumbers(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entrances = make_entrances(listener, 2)
        here, other = [Handover(copy_of(entrance), shared) for entrance in entrances]
        here.beat()
        other.beat()
        assert [here.keeps(listener) for _ in range(2)] == [True, False]
        with no_descriptor_left():
            assert not list(other.received())
            assert all(here.keeps(listener) for _ in range(5))
            other.beat()
            assert all(here.keeps(listener) for _ in range(5))
        other.beat()
        assert not here.keeps(listener), "there is one again"
        for opened in (*other.received(), here, other):
            opened.close()
        close_pipes(entrances)


@pytest.mark.parametrize("has_ended", [True, False])
def test_what_is_on_its_way_to_a_process_that_hangs_or_ends_is_for_another(
    has_ended: bool, tmp_path: Path
) -> None:
    shared = SharedNumbers(tmp_path, 2)
    now = 10.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entrances = make_entrances(listener, 2)
        here, other = [
            Handover(copy_of(entrance), shared, clock=lambda: now) for entrance in entrances
        ]
        here.beat()
        other.beat()
        assert [here.keeps(listener) for _ in range(4)] == [True, False, True, False]
        assert not list(here.left_by_others()), "the other one serves"
        if has_ended:
            other.close()
        else:
            now += 10 * BEAT_INTERVAL_S
            assert not list(here.left_by_others()), "this one hangs, too"
        here.beat()
        received = list(here.left_by_others())
        assert len(received) == 2
        if not has_ended:
            other.beat()
            assert [here.keeps(listener) for _ in range(3)] == [False] * 3, "it has none"
            received += other.received()
            other.close()
        for opened in (*received, here):
            opened.close()
        close_pipes(entrances)
