"""The event loop of the running server, from ready workers to the end.

What HTTP and the terminal need is imported here only, because `launch.py` starts the workers
before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed
from minisgl.message import FrontendMsg, TokenizerMsg, decoder, encode
from minisgl.server.api_server import create_app, warm_up
from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend
from minisgl.server.http.connections import ConnectionLimits
from minisgl.server.http.listener import create_server
from minisgl.server.openai.common import now
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import has_reasoning_switch
from minisgl.server.served_model import ServedModel
from minisgl.server.shell import run_shell
from minisgl.utils.garbage import start_serving
from minisgl.utils.mp import Addresses, AsyncPullQueue, PushQueue
from minisgl.utils.supervisor import StartupReport, Supervisor

logger = logging.getLogger(__name__)


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
    addresses: Addresses,
    supervisor: Supervisor,
    listener: socket.socket,
) -> None:
    """Serve until a signal, the end of the shell, or a failure.

    Raises:
        EngineFailed: a worker died; every open request has ended with this error.
    """
    asyncio.run(_serve(config, model, addresses, supervisor, listener))


async def _serve(
    config: ServerConfig,
    model: ServedModel,
    addresses: Addresses,
    supervisor: Supervisor,
    listener: socket.socket,
) -> None:
    queues = [PushQueue[TokenizerMsg](address, encode) for address in addresses.tokenizers]
    replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(addresses.frontend, decoder(FrontendMsg))
    frontend = Frontend(queues, replies, config.max_open_requests)
    app = create_app(
        frontend,
        model,
        config.max_body_mb << 20,
        config.api_key,
        config.cors_origins,
        shares_prefixes=config.share_prefixes_between_keys,
        strict_fields=config.strict_fields,
        body_timeout_s=config.body_timeout_s,
    )
    await warm_up(app)
    server = create_server(app, connection_limits(config), config.keep_alive_timeout_s)
    stop = asyncio.Event()
    _set_on_signals(stop)

    # The server ends when one of these tasks ends.
    http_task = asyncio.create_task(server.serve([listener]))
    watch_task = asyncio.create_task(supervisor.watch())
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(frontend.run()),
        http_task,
        watch_task,
    ]
    if config.shell:
        sampling = SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
        shell = run_shell(frontend, model.name, sampling, stop.set)
        tasks.append(asyncio.create_task(shell))
    start_serving()
    logger.info("%s is served at http://%s/v1", model.name, _host_and_port(listener))
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    # Open requests end with an error, then connections, then the workers.
    failure = watch_task.result() if watch_task in done else None
    frontend.fail(failure or "the server is shutting down")
    server.should_exit = True
    await asyncio.wait([http_task])
    for task in pending - {http_task}:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    app.state.body_reader.close()
    frontend.shut_down()
    if failure:
        raise EngineFailed(failure)
    for task in done:
        task.result()


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    assert config.max_connections is not None  # `launch.py` resolves it
    return ConnectionLimits(config.max_connections, config.header_timeout_s)


def _host_and_port(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_on_signals(stop: asyncio.Event) -> None:
    """Let SIGINT and SIGTERM set the event. A second signal ends the program at once."""

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        logger.info("shutting down")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
