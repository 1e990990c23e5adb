"""The parts of every API process: the application over a frontend, and its HTTP server.

`serve.py` runs the first of them, `api_worker.py` each of the others. Next to read:
`http/routes.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, InvalidRequest
from minisgl.message import FrontendMsg, ServeMsg, decoder
from minisgl.processes.addresses import Addresses
from minisgl.processes.queues import AsyncPullQueue
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.answers.objects import now
from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend
from minisgl.server.http.application import create_app, warm_up
from minisgl.server.http.connection_table import ConnectionLimits
from minisgl.server.http.handover import Entrance, Handover
from minisgl.server.http.listener import create_server
from minisgl.server.key_limits import KeyLimits
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import has_reasoning_switch
from minisgl.server.peers import Peers
from minisgl.server.served_model import ServedModel
from minisgl.worker_info import SchedulerInfo, TokenizerInfo, WorkerInfo

if TYPE_CHECKING:
    from minisgl.server.http.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ApiProcess:
    """The parts of an API process; all run in one event loop.

    Attributes:
        key_limits: those of the keys, if there is a file of them.
        tracer: makes traces, if there is a collector of them.
    """

    model: ServedModel
    frontend: Frontend
    app: FastAPI
    http: uvicorn.Server
    key_limits: KeyLimits | None
    tracer: Tracer | None

    async def flush_traces(self) -> None:
        """Send the traces that wait, after the last request."""
        if self.tracer:
            await asyncio.to_thread(self.tracer.shut_down)


def served_model(
    name: str, model: ModelConfig, workers: Sequence[WorkerInfo], config: ServerConfig
) -> ServedModel:
    """Describe the served model for the API, from the reports of its workers.

    Those of all tokenizers are equal.

    Raises:
        ConfigError: the options name a format of tool calls that the prompts cannot have, or the
            model recommends what no request could follow.
    """
    try:
        SamplingParams(**model.sampling_defaults)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ConfigError(f"the generation_config.json of {name}: {error}") from None
    limit = min(worker.max_seq_len for worker in workers if isinstance(worker, SchedulerInfo))
    tokenizer = next(worker for worker in workers if isinstance(worker, TokenizerInfo))
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


async def make_api_process(
    config: ServerConfig,
    model: ServedModel,
    start: ServeMsg,
    addresses: Addresses,
    entrance: Entrance,
    peers: Peers,
) -> ApiProcess:
    """The parts of one of the API processes, ready to serve.

    Args:
        config: as `launch.py` has resolved it.
    """
    assert config.max_connections is not None
    api = entrance.api
    shared = SharedNumbers(addresses.folder if addresses.num_api > 1 else None, addresses.num_api)
    replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
        addresses.frontends[api], decoder(FrontendMsg)
    )
    frontend = Frontend(
        addresses,
        replies,
        config.max_open_requests,
        config.request_timeout_s,
        api=api,
        shared=shared,
    )
    key_limits = None if start.key_limits is None else KeyLimits(start.key_limits, shared)
    tracer = _open_tracer(config.otlp_endpoint, model) if config.otlp_endpoint else None
    app = create_app(
        frontend,
        model,
        config,
        salt_secret=start.secret,
        key_limits=key_limits,
        peers=peers,
        tracer=tracer,
    )
    await warm_up(app)
    limits = ConnectionLimits(config.max_connections, config.header_timeout_s)
    handover = Handover(entrance, shared)
    http = create_server(app, limits, config.keep_alive_timeout_s, shared, handover)
    return ApiProcess(model, frontend, app, http, key_limits, tracer)


def _open_tracer(endpoint: str, model: ServedModel) -> Tracer:
    from minisgl.server.http.tracing import open_tracer  # its library is optional

    return open_tracer(endpoint, model.name)
