"""The first API process: its event loop, from ready workers to the end.

Modules for HTTP and the terminal are imported only here, because `launch.py` starts the workers
before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.message import EndMsg, KeyLimitsMsg, PeerMsg, RefuseMsg, ServeMsg
from minisgl.server.api_process import ApiProcess, make_api_process, served_model
from minisgl.server.args import ServerConfig, host_and_port
from minisgl.server.frontend import Frontend
from minisgl.server.http.handover import Entrance
from minisgl.server.key_limits import KeyLimits, read_key_limits
from minisgl.server.peers import Peers
from minisgl.server.recovery import Recovery
from minisgl.server.served_model import ServedModel
from minisgl.server.shell import run_shell
from minisgl.server.workers import Workers
from minisgl.utils.garbage import start_serving
from minisgl.utils.heap import return_free_memory_regularly
from minisgl.utils.signals import SignalPairs
from minisgl.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server is shutting down"
_SECRET_BYTES = 32
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    config: ServerConfig,
    model_config: ModelConfig,
    infos: Sequence[WorkerInfo],
    workers: Workers,
    entrance: Entrance,
    key_limits: str | None = None,
) -> None:
    """Serve until a signal, the end of the shell, or a failure.

    After a signal, or the end of the shell, open requests have `drain_timeout_s` to end.

    Args:
        infos: what the workers say of themselves.
        key_limits: the text of the file of limits.

    Raises:
        ConfigError: the options name a format of tool calls that the prompts cannot have, or the
            model recommends what no request could follow.
        EngineFailed: workers failed too often; every open request has ended with this error.
        OutputFailed: the shell's output cannot be written.
        KeyboardInterrupt: a second signal came; so has every open request.
    """
    assert config.served_model_name is not None  # `launch.py` resolves it
    model = served_model(config.served_model_name, model_config, infos, config)
    secret = secrets.token_bytes(_SECRET_BYTES)
    start = ServeMsg(list(infos), model.created, secret, key_limits)
    with handlers_restored():
        is_hurried = asyncio.run(_serve(config, model, start, workers, entrance))
    if is_hurried:  # not in a task: asyncio's own end would have this as its context
        raise KeyboardInterrupt


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Handle SIGINT and SIGTERM afterwards as before. An event loop leaves the system's handlers.

    A signal while the workers end would kill this process, and leave its folder.
    """
    previous = {number: signal.getsignal(number) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _serve(
    config: ServerConfig,
    model: ServedModel,
    start: ServeMsg,
    workers: Workers,
    entrance: Entrance,
) -> bool:
    """Serve; returns whether a second signal has ended it."""
    peers = Peers(workers.addresses, api=0)
    process = await make_api_process(config, model, start, workers.addresses, entrance, peers)
    frontend = process.frontend
    peers.post(start)
    signals = _Signals()
    if process.key_limits:
        _call_at_hangup(partial(_reload, config, process.key_limits, peers))
    tasks = _Tasks(
        serving=asyncio.create_task(process.http.serve([entrance.listener])),
        delivery=asyncio.create_task(frontend.run()),
        answering=asyncio.create_task(peers.run(frontend.metrics.samples, _no_message_comes)),
        recovery=asyncio.create_task(Recovery(workers, frontend, peers).run()),
        leave=asyncio.create_task(_wait_to_leave(config, model, frontend, signals)),
        hurry=asyncio.create_task(signals.second.wait()),
    )
    start_serving(has_connections=True)
    return_free_memory_regularly()
    address = host_and_port(*entrance.listener.getsockname()[:2])
    logger.info("%s is served at http://%s/v1", model.name, address)
    try:
        return await _serve_until_the_end(tasks, process, peers, config.drain_timeout_s)
    finally:
        if process.key_limits:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        process.app.state.body_reader.close()
        frontend.shut_down()
        peers.close()
        await process.flush_traces()


def _no_message_comes(msg: PeerMsg) -> None:
    raise AssertionError(f"{msg} is for the first API process to send")


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What runs while the server does.

    Attributes:
        answering: answers other API processes.
        recovery: ends with an error when the workers cannot be started again.
        leave: ends when the server should end, after a signal or the end of the shell.
        hurry: ends when it should do so at once.
    """

    serving: asyncio.Task[None]
    delivery: asyncio.Task[None]
    answering: asyncio.Task[None]
    recovery: asyncio.Task[None]
    leave: asyncio.Task[None]
    hurry: asyncio.Task[Any]

    async def cancel(self) -> None:
        tasks = (*self.needed, self.leave, self.hurry)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def needed(self) -> set[asyncio.Task[None]]:
        """The tasks that must go on for the server to serve."""
        return {self.serving, self.delivery, self.answering, self.recovery}


async def _serve_until_the_end(
    tasks: _Tasks, process: ApiProcess, peers: Peers, drain_timeout_s: float
) -> bool:
    """Serve; then open requests end, by themselves or with an error, and after them connections.

    Returns:
        whether a second signal has ended them.
    """
    await _wait_for_one({*tasks.needed, tasks.leave})
    if tasks.leave.done():
        process.frontend.refuse(_SHUTTING_DOWN)
        peers.post(RefuseMsg(_SHUTTING_DOWN))
        drained = asyncio.create_task(process.frontend.drained())
        await _wait_for_one({*tasks.needed, drained, tasks.hurry}, drain_timeout_s)
        drained.cancel()

    failure = tasks.recovery.exception() if tasks.recovery.done() else None
    reason = str(failure or _SHUTTING_DOWN)
    tasks.recovery.cancel()  # from now on API processes may end
    process.frontend.fail(reason)
    peers.post(EndMsg(reason))
    http = process.http
    http.should_exit = True
    await _wait_for_one({tasks.serving, tasks.hurry})
    http.force_exit = True  # it waits for connections no longer
    await asyncio.wait({tasks.serving})

    is_hurried = tasks.hurry.done()
    finished = [task for task in (*tasks.needed, tasks.leave) if task.done()]
    await tasks.cancel()
    if not is_hurried:
        for task in finished:
            if not task.cancelled():
                task.result()
    return is_hurried


async def _wait_for_one(tasks: set[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _wait_to_leave(
    config: ServerConfig, model: ServedModel, frontend: Frontend, signals: _Signals
) -> None:
    """Wait for a signal, or chat in the terminal until the end of the shell."""
    if not config.shell:
        await signals.first.wait()
        return
    sampling = SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
    shell = asyncio.create_task(run_shell(frontend, model.name, sampling, signals.on_signal))
    first_signal = asyncio.create_task(signals.first.wait())
    await _wait_for_one({shell, first_signal})
    signals.first.set()  # after the shell's end, the next signal is the second
    shell.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await shell


def _call_at_hangup(function: Callable[[], None]) -> None:
    """Call a function in this event loop after each SIGHUP, also after one during the start.

    That one waits, because `launch.py` has blocked the signal. The loop's own way would not do: at
    its end it leaves the system's handler, which kills.
    """
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(function))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _reload(config: ServerConfig, key_limits: KeyLimits, peers: Peers) -> None:
    assert config.key_limits
    try:
        text = read_key_limits(Path(config.key_limits), config.api_key)
        key_limits.replace(text, key_limits.text_number + 1)
    except ConfigError as error:
        logger.error("%s; the limits stay as they were", error)
        return
    peers.post(KeyLimitsMsg(text, key_limits.text_number))
    logger.info("the limits of the keys were read again")


class _Signals:
    """SIGINT and SIGTERM: the first lets open requests end, the second ends them at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._pairs = SignalPairs()
        for number in _END_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        if self._pairs.is_second_of_pair():
            return
        if self.first.is_set():
            self.second.set()
            return
        logger.info("shutting down; another signal ends open requests at once")
        self.first.set()
