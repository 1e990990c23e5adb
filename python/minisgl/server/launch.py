"""From options to a running server, and its end.

    read the options, fetch the model ─▶ start the workers ─▶ all ready ─▶ listen, serve
                                                                                │
                                             a signal, too many failures, or the end of the shell
                                                                                │
    folder removed, exit code ◀─ workers ended ◀─ open requests ended, or with an error ◀─┘

The parent process is the first API process, or the only one. Its exit code is 0 after the end of
the shell, or after a signal while it serves. It is 130 after an earlier signal or a second one, and
1 if anything failed.

A scheduler takes longest to start, because torch alone takes seconds to import. So it is started
first, by a process that has imported little: not torch, which the parent never needs, and not yet
what `serve.py` imports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from minisgl.checkpoint import ModelConfig, fetch_model, model_name
from minisgl.errors import ConfigError, MiniSGLError
from minisgl.processes.private_folder import private_folder
from minisgl.processes.supervisor import Supervisor
from minisgl.rank_counts import check_rank_count
from minisgl.server.args import ServerConfig, host_and_port, parse_args
from minisgl.server.capacity import (
    BACKLOG,
    fit_api_workers,
    fit_connections,
    raise_descriptor_limit,
)
from minisgl.server.http.handover import make_entrances
from minisgl.server.key_limits import read_key_limits
from minisgl.server.workers import Workers
from minisgl.utils import set_up_logging
from minisgl.utils.garbage import keep_imports
from minisgl.utils.hardware import check_proc
from minisgl.utils.heap import use_one_heap
from minisgl.utils.signals import SignalPairs
from minisgl.utils.standard_streams import open_closed_streams
from minisgl.utils.threads import lack_of_threads_is_explained

logger = logging.getLogger(__name__)


def launch_server(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. A failure is one line on stderr."""
    open_closed_streams()
    use_one_heap()
    try:
        config = parse_args(argv)
        set_up_logging("server", config.log_level, as_json=config.log_json)
        with lack_of_threads_is_explained():
            return _run(config)
    except MiniSGLError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)  # noqa: T201 - how the program ends
        return 1
    except KeyboardInterrupt:
        return 130


def _run(config: ServerConfig) -> int:
    check_proc()
    key_limits = _key_limits(config)
    folder = fetch_model(config.model, config.model_source)
    model_config = ModelConfig.from_folder(folder)
    check_rank_count(config.tp, model_config, ep=config.ep)
    name = config.served_model_name or model_name(config.model)
    config = _fit(replace(config.fix_for_ranks(folder), served_model_name=name))
    max_seq_len = config.max_seq_len or model_config.max_position
    with (
        interruptible(),
        _bind(config) as listener,
        private_folder() as ipc,
        Supervisor(config.log_level, log_json=config.log_json) as supervisor,
    ):
        workers = Workers(config, supervisor, ipc, max_seq_len)
        workers.start()
        entrances = make_entrances(listener, workers.addresses.num_api)
        workers.start_api_workers(entrances)
        with keep_imports():
            from minisgl.server.serve import serve  # here, while the workers start

        logger.debug("the server is imported")
        infos = workers.wait_ready()
        logger.debug("all workers are ready")
        _listen(listener)
        serve(config, model_config, infos, workers, entrances[0], key_limits)
    return 0


def _key_limits(config: ServerConfig) -> str | None:
    """The text of the file of limits, if there is one."""
    if config.key_limits is None:
        return None
    if not config.api_key:
        raise ConfigError("--key-limits needs keys: --api-key or MINISGL_API_KEY")
    # A SIGHUP that comes from now on waits until `serve.py` reads the file again.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    return read_key_limits(Path(config.key_limits), config.api_key)


def _fit(config: ServerConfig) -> ServerConfig:
    """The options, with as many API processes and connections as this machine has room for."""
    api_workers = config.api_workers or fit_api_workers(len(os.sched_getaffinity(0)))
    num_ranks = config.tp if config.keep_standbys is False else 2 * config.tp
    num_workers = num_ranks + config.num_tokenizer + 1 + api_workers
    limit = fit_connections(config.max_connections, num_workers, raise_descriptor_limit())
    return replace(config, api_workers=api_workers, max_connections=limit)


def _bind(config: ServerConfig) -> socket.socket:
    """Bind the port now, so that a clash is reported at once.

    Connections are accepted when all is ready.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol by name: asyncio turns Nagle's algorithm off only where the socket says TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        address = host_and_port(config.host, config.port)
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; see --host and --port"
        ) from None
    return listener


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another server took the port while this one was loading
        address = host_and_port(*listener.getsockname()[:2])
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; see --port") from None


class _Interrupted(KeyboardInterrupt):
    """A signal before the server serves.

    Not KeyboardInterrupt itself: if that passes code that was compiled from a text, as that of each
    dataclass is, CPython ends the program by SIGINT later, whatever its exit code.
    """


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, until the event loop handles the signals.

    Also where a library makes another error of it, as pydantic does while it builds a schema. A
    SIGINT that is ignored stays so: a shell starts programs in the background like this.
    """
    has_come = False
    pairs = SignalPairs()

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal has_come
        if pairs.is_second_of_pair():
            return
        has_come = True
        raise _Interrupted

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except Exception:
        if has_come:
            raise _Interrupted from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
