"""From options to a running server, and back to nothing.

    resolve the options, fetch the model ─▶ start the children ─▶ all ready ─▶ listen, serve
                                                                                  │ signal, dead child, shell's end
    folder removed, exit code ◀─ children ended ◀─ told to end ◀─ open requests told ◀─┘

The parent process is the API server. Its exit code is 0 after a signal or the shell's end, 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from minisgl.checkpoint import ModelConfig, fetch_model, model_name
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, EngineFailed, MiniSGLError
from minisgl.message import FrontendMsg, TokenizerMsg, decoder, encode
from minisgl.scheduler import scheduler_worker
from minisgl.server.api_server import ServedModel, create_app
from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.dialect import Dialect
from minisgl.server.frontend import Frontend
from minisgl.server.objects import now
from minisgl.server.shell import run_shell
from minisgl.tokenizer import tokenize_worker
from minisgl.utils import set_up_logging
from minisgl.utils.mp import Addresses, AsyncPullQueue, PushQueue, private_folder
from minisgl.utils.supervisor import Report, Supervisor

logger = logging.getLogger(__name__)

_DRAIN_S = 5
_BACKLOG = 2048


def launch_server(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. A failure is one line on stderr."""
    try:
        config = parse_args(argv)
        set_up_logging("server", config.log_level)
        return _run(config)
    except MiniSGLError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)  # noqa: T201 - the program's last word
        return 1
    except KeyboardInterrupt:
        return 130


def _run(config: ServerConfig) -> int:
    folder = fetch_model(config.model, config.model_source)
    model_config = ModelConfig.from_folder(folder)
    name = config.served_model_name or model_name(config.model)
    config = config.agree(folder)
    with _interruptible(), _listen(config) as listener, private_folder() as ipc:
        addresses = Addresses(ipc, config.num_tokenizer)
        with Supervisor(config.log_level) as supervisor:
            _start_workers(supervisor, config, addresses, config.max_seq_len or model_config.max_position)
            reports = supervisor.wait_ready(config.start_timeout_s)
            _accept_connections(listener)
            limits = [report.max_seq_len for report in reports if report.max_seq_len is not None]
            dialect = _dialect(reports, config)
            defaults, width = model_config.sampling_defaults, model_config.width
            model = ServedModel(name, min(limits), defaults, now(), width, dialect)
            asyncio.run(_serve(config, model, addresses, supervisor, listener))
    return 0


def _dialect(reports: list[Report], config: ServerConfig) -> Dialect:
    """As the tokenizers say; they all say the same."""
    vocabulary = next(report.vocabulary for report in reports if report.vocabulary)
    return Dialect.of(vocabulary.chat_template, vocabulary.markers, config.tool_call_parser, config.reasoning_parser)


def _listen(config: ServerConfig) -> socket.socket:
    """Take the port now, so that a clash is said at once; connections are accepted only when all is ready."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; see --port") from None
    return listener


def _accept_connections(listener: socket.socket) -> None:
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another server took the port while this one was loading
        raise ConfigError(f"cannot listen on {listener.getsockname()}: {error.strerror}; see --port") from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Until the event loop takes the signals, SIGTERM ends the program as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start_workers(supervisor: Supervisor, config: ServerConfig, addresses: Addresses, max_seq_len: int) -> None:
    assert config.model
    folder = Path(config.model)
    for rank in range(config.tp):
        supervisor.start(f"scheduler-{rank}", scheduler_worker, config, rank, addresses)
    supervisor.start("detokenizer", tokenize_worker, folder, max_seq_len, addresses.detokenizer, addresses)
    for i in range(config.num_tokenizer):
        supervisor.start(f"tokenizer-{i}", tokenize_worker, folder, max_seq_len, addresses.tokenizers[i], addresses)


async def _serve(
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
    queues = [PushQueue[TokenizerMsg](address, encode) for address in addresses.tokenizers]
    replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(addresses.frontend, decoder(FrontendMsg))
    frontend = Frontend(queues, replies, config.max_open_requests)
    app = create_app(frontend, model, config.max_body_mb << 20, config.api_key, config.cors_origins)
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_DRAIN_S))
    reading = asyncio.create_task(frontend.run())
    serving = asyncio.create_task(server.serve([listener]))
    dying = asyncio.create_task(supervisor.watch())
    stop = asyncio.Event()
    _on_signals(stop)
    reasons_to_end: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait()), dying, serving, reading]
    if config.shell:
        sampling = SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
        reasons_to_end.append(asyncio.create_task(run_shell(frontend, model.name, sampling, stop.set)))
    host, port = listener.getsockname()[:2]
    logger.info("%s is served at http://%s:%d/v1", model.name, f"[{host}]" if ":" in host else host, port)

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
