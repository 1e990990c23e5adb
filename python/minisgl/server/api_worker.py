"""An API process other than the first: it serves until the first one tells it to end.

It has no workers of its own. The first process tells it about workers and signals.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from minisgl.checkpoint import ModelConfig
from minisgl.errors import ConfigError
from minisgl.message import (
    EndMsg,
    KeyLimitsMsg,
    PeerMsg,
    RefuseMsg,
    ReplaceMsg,
    ResumeMsg,
    ServeMsg,
    SuspendMsg,
)
from minisgl.processes.addresses import Addresses
from minisgl.processes.child import BEAT_INTERVAL_S, Ready, StartupReport
from minisgl.server.api_process import ApiProcess, make_api_process, served_model
from minisgl.server.args import ServerConfig
from minisgl.server.http.handover import Entrance
from minisgl.server.peers import Peers
from minisgl.utils.garbage import start_serving
from minisgl.utils.heap import return_free_memory_regularly, use_one_heap

logger = logging.getLogger(__name__)


def api_worker(
    ready: Ready, config: ServerConfig, addresses: Addresses, entrance: Entrance
) -> None:
    """Body of the process."""
    use_one_heap()
    asyncio.run(_run(ready, config, addresses, entrance))


async def _run(
    ready: Ready, config: ServerConfig, addresses: Addresses, entrance: Entrance
) -> None:
    peers = Peers(addresses, entrance.api)
    beating = asyncio.create_task(_beat(ready))
    ready(StartupReport())
    start = await peers.receive()
    if isinstance(start, ServeMsg):  # else the server ends before it has begun to serve
        await _serve(config, start, addresses, entrance, peers)
    beating.cancel()
    peers.close()


async def _serve(
    config: ServerConfig,
    start: ServeMsg,
    addresses: Addresses,
    entrance: Entrance,
    peers: Peers,
) -> None:
    assert config.model is not None
    assert config.served_model_name is not None
    model_config = ModelConfig.from_folder(Path(config.model))
    model = served_model(config.served_model_name, model_config, start.workers, config)
    model = replace(model, created=start.created)
    process = await make_api_process(config, model, start, addresses, entrance, peers)
    frontend = process.frontend
    messages = _PeerMessages(process, addresses)
    serving = asyncio.create_task(process.http.serve([entrance.listener]))
    tasks = {
        serving,
        asyncio.create_task(frontend.run()),
        asyncio.create_task(peers.run(frontend.metrics.samples, messages.apply)),
    }
    start_serving(has_connections=True)
    return_free_memory_regularly()
    finished, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    process.app.state.body_reader.close()
    frontend.close()
    await process.flush_traces()
    for task in finished:
        task.result()


class _PeerMessages:
    """Does what the messages of the first API process say."""

    def __init__(self, process: ApiProcess, addresses: Addresses) -> None:
        self._process = process
        self._addresses = addresses

    def apply(self, msg: PeerMsg) -> None:
        frontend = self._process.frontend
        match msg:
            case SuspendMsg(reason, outage_s):
                frontend.suspend(reason, outage_s)
            case ResumeMsg(epoch):
                self._addresses = self._addresses.in_epoch(epoch)
                frontend.resume(self._addresses)
            case ReplaceMsg(name, life, reason):
                self._addresses = self._addresses.in_life(name, life)
                frontend.replace_worker(name, self._addresses, reason)
            case KeyLimitsMsg(text, text_number):
                self._replace_key_limits(text, text_number)
            case RefuseMsg(reason):
                frontend.refuse(reason)
            case EndMsg(reason):
                frontend.fail(reason)
                self._process.http.should_exit = True

    def _replace_key_limits(self, text: str, text_number: int) -> None:
        assert self._process.key_limits
        try:
            self._process.key_limits.replace(text, text_number)
        except ConfigError as error:
            logger.error("%s; the limits stay as they were in this process", error)


async def _beat(ready: Ready) -> None:
    """Say all the time that this process's event loop goes on."""
    while True:
        ready.beat()
        await asyncio.sleep(BEAT_INTERVAL_S)
