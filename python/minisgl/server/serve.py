"""The server while it serves: the event loop, from ready workers to the reason to end.

Everything that HTTP and the terminal need is imported here, and here only: `launch.py` starts the workers first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed
from minisgl.message import FrontendMsg, TokenizerMsg, decoder, encode
from minisgl.server.api_server import ServedModel, create_app
from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend
from minisgl.server.openai.common import now
from minisgl.server.parsing import Dialect
from minisgl.server.shell import run_shell
from minisgl.utils.mp import Addresses, AsyncPullQueue, PushQueue
from minisgl.utils.supervisor import Report, Supervisor

logger = logging.getLogger(__name__)

_DRAIN_S = 5


def served_model(
    name: str, model: ModelConfig, reports: Sequence[Report], config: ServerConfig
) -> ServedModel:
    """What the API says of a model, as its workers report. All tokenizers say the same."""
    limit = min(report.max_seq_len for report in reports if report.max_seq_len is not None)
    vocabulary = next(report.vocabulary for report in reports if report.vocabulary)
    dialect = Dialect.of(
        vocabulary.chat_template,
        vocabulary.markers,
        config.tool_call_parser,
        config.reasoning_parser,
    )
    return ServedModel(name, limit, model.sampling_defaults, now(), model.width, dialect)


def serve(
    config: ServerConfig,
    model: ServedModel,
    addresses: Addresses,
    supervisor: Supervisor,
    listener: socket.socket,
) -> None:
    """Serve until told to stop.

    Raises:
        EngineFailed: a worker died; every open request was told.
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
    app = create_app(frontend, model, config.max_body_mb << 20, config.api_key, config.cors_origins)
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_DRAIN_S)
    )
    reading = asyncio.create_task(frontend.run())
    serving = asyncio.create_task(server.serve([listener]))
    dying = asyncio.create_task(supervisor.watch())
    stop = asyncio.Event()
    _on_signals(stop)
    reasons_to_end: list[asyncio.Task[Any]] = [
        asyncio.create_task(stop.wait()),
        dying,
        serving,
        reading,
    ]
    if config.shell:
        sampling = SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
        reasons_to_end.append(
            asyncio.create_task(run_shell(frontend, model.name, sampling, stop.set))
        )
    host, port = listener.getsockname()[:2]
    logger.info(
        "%s is served at http://%s:%d/v1", model.name, f"[{host}]" if ":" in host else host, port
    )

    done, pending = await asyncio.wait(reasons_to_end, return_when=asyncio.FIRST_COMPLETED)
    failure = dying.result() if dying in done else None
    frontend.fail(failure or "the server is shutting down")
    server.should_exit = True
    await asyncio.wait([serving])
    for task in pending - {serving}:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    frontend.shut_down()
    if failure:
        raise EngineFailed(failure)
    for task in done:
        task.result()


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to `_serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _on_signals(stop: asyncio.Event) -> None:
    """Have SIGINT and SIGTERM set the event. A second one ends the program at once."""

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        logger.info("shutting down")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
