"""The event loop of the running server, from ready workers to the end.

What HTTP and the terminal need is imported here only, because `launch.py` starts the workers
before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.message import FrontendMsg, decoder
from minisgl.server.api_server import create_app, warm_up
from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend, connect_tokenizers
from minisgl.server.http.connections import ConnectionLimits
from minisgl.server.http.listener import create_server
from minisgl.server.key_limits import KeyLimits
from minisgl.server.openai.common import now
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import has_reasoning_switch
from minisgl.server.recovery import Recovery
from minisgl.server.served_model import ServedModel
from minisgl.server.shell import run_shell
from minisgl.server.workers import Workers
from minisgl.utils.garbage import start_serving
from minisgl.utils.mp import AsyncPullQueue
from minisgl.utils.supervisor import StartupReport

logger = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server is shutting down"


def served_model(
    name: str, model: ModelConfig, reports: Sequence[StartupReport], config: ServerConfig
) -> ServedModel:
    """What the API says of a model, from the reports of its workers.

    Those of all tokenizers are equal.

    Raises:
        ConfigError: the options name a format of tool calls that the prompts cannot have.
    """
    limit = min(report.max_seq_len for report in reports if report.max_seq_len is not None)
    tokenizer = next(report.tokenizer for report in reports if report.tokenizer)
    dialect = Dialect.of(
        tokenizer,
        config.tool_call_parser,
        config.reasoning_parser,
        opens_tool_schemas=config.open_tool_schemas,
    )
    return ServedModel(
        name,
        limit,
        model.sampling_defaults,
        now(),
        model.width,
        dialect,
        has_reasoning_switch=has_reasoning_switch(tokenizer.chat_template),
    )


def serve(
    config: ServerConfig,
    model: ServedModel,
    workers: Workers,
    listener: socket.socket,
    key_limits: KeyLimits | None = None,
) -> None:
    """Serve until a signal, the end of the shell, or a failure.

    After a signal, or the end of the shell, open requests have `drain_timeout_s` to end.

    Raises:
        EngineFailed: workers failed too often; every open request has ended with this error.
        KeyboardInterrupt: a second signal came; so has every open request.
    """
    asyncio.run(_serve(config, model, workers, listener, key_limits))


async def _serve(
    config: ServerConfig,
    model: ServedModel,
    workers: Workers,
    listener: socket.socket,
    key_limits: KeyLimits | None = None,
) -> None:
    replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
        workers.addresses.frontend, decoder(FrontendMsg)
    )
    tokenizers = connect_tokenizers(workers.addresses)
    frontend = Frontend(tokenizers, replies, config.max_open_requests, config.request_timeout_s)
    app = create_app(
        frontend,
        model,
        config.max_body_mb << 20,
        config.api_key,
        config.cors_origins,
        shares_prefixes=config.share_prefixes_between_keys,
        strict_fields=config.strict_fields,
        body_timeout_s=config.body_timeout_s,
        key_limits=key_limits,
    )
    await warm_up(app)
    http = create_server(app, connection_limits(config), config.keep_alive_timeout_s)
    signals = _Signals()
    if key_limits:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, _reload, key_limits)
    tasks = _Tasks(
        serving=asyncio.create_task(http.serve([listener])),
        delivery=asyncio.create_task(frontend.run()),
        recovery=asyncio.create_task(Recovery(workers, frontend).run()),
        leave=asyncio.create_task(_wait_to_leave(config, model, frontend, signals)),
        hurry=asyncio.create_task(signals.second.wait()),
    )
    start_serving()
    logger.info("%s is served at http://%s/v1", model.name, _host_and_port(listener))
    try:
        await _serve_until_the_end(tasks, frontend, http, config.drain_timeout_s)
    finally:
        app.state.body_reader.close()
        frontend.shut_down()


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What runs while the server does.

    Attributes:
        recovery: ends with an error when the workers cannot be started again.
        leave: ends when the server shall, after a signal or the end of the shell.
        hurry: ends when it shall do so at once.
    """

    serving: asyncio.Task[None]
    delivery: asyncio.Task[None]
    recovery: asyncio.Task[None]
    leave: asyncio.Task[None]
    hurry: asyncio.Task[Any]

    async def cancel(self) -> None:
        tasks = (self.serving, self.delivery, self.recovery, self.leave, self.hurry)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve_until_the_end(
    tasks: _Tasks, frontend: Frontend, http: uvicorn.Server, drain_timeout_s: float
) -> None:
    """Serve; then open requests end, by themselves or with an error, and after them connections."""
    needed = {tasks.serving, tasks.delivery, tasks.recovery}
    await _wait_for_one({*needed, tasks.leave})
    if tasks.leave.done():
        draining = asyncio.create_task(frontend.drain(_SHUTTING_DOWN))
        await _wait_for_one({*needed, draining, tasks.hurry}, drain_timeout_s)
        draining.cancel()

    failure = tasks.recovery.exception() if tasks.recovery.done() else None
    frontend.fail(str(failure or _SHUTTING_DOWN))
    http.should_exit = True
    await _wait_for_one({tasks.serving, tasks.hurry})
    http.force_exit = True  # it waits for connections no longer
    await asyncio.wait({tasks.serving})

    is_hurried = tasks.hurry.done()
    finished = [task for task in (*needed, tasks.leave) if task.done()]
    await tasks.cancel()
    if is_hurried:
        raise KeyboardInterrupt
    for task in finished:
        task.result()


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


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    assert config.max_connections is not None  # `launch.py` resolves it
    return ConnectionLimits(config.max_connections, config.header_timeout_s)


def _host_and_port(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reload(key_limits: KeyLimits) -> None:
    try:
        key_limits.reload()
    except ConfigError as error:
        logger.error("%s; the limits stay as they were", error)
    else:
        logger.info("the limits of the keys were read again")


class _Signals:
    """SIGINT and SIGTERM: the first lets open requests end, the second ends them at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        if self.first.is_set():
            self.second.set()
            return
        logger.info("shutting down; another signal ends open requests at once")
        self.first.set()
