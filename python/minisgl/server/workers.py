"""The server's child processes: schedulers, detokenizer and tokenizers, and API processes.

Each start of all of them but the API processes is an *epoch*, with sockets of its own. Within an
epoch a tokenizer or the detokenizer may be replaced. Imports little: the first epoch starts before
the parent has imported its HTTP server.

The next epoch's schedulers may stand by meanwhile, as processes that have imported torch. They are
started when this epoch has served for a while, so that they do not compete with its start.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from minisgl.processes.addresses import DETOKENIZER, Addresses
from minisgl.processes.child import Assignment
from minisgl.processes.failures import Failure
from minisgl.processes.supervisor import Supervisor
from minisgl.server.args import ServerConfig
from minisgl.server.http.handover import Entrance
from minisgl.worker_info import SchedulerInfo, WorkerInfo, decode_info

logger = logging.getLogger(__name__)

_RANK = "minisgl.rank_process:run_rank"
_RANK_IMPORTS = "minisgl.rank_process:import_scheduler"
_STANDBYS_AFTER_S = 2.0  # since the workers serve
_STANDBYS_AGAIN_AFTER_S = 60.0  # since one has died


class Workers:
    """The children of one server, under its supervisor.

    Args:
        folder: of the sockets.
        max_seq_len: no prompt may have more tokens.
    """

    def __init__(
        self, config: ServerConfig, supervisor: Supervisor, folder: Path, max_seq_len: int
    ) -> None:
        assert config.model
        self._config = config
        self._model = Path(config.model)
        self._supervisor = supervisor
        self._max_seq_len = max_seq_len
        self._started_at = 0.0
        self._start_s = 1.0
        assert config.api_workers is not None  # `launch.py` resolves it
        self.addresses = Addresses(folder, config.num_tokenizer, num_api=config.api_workers)
        self._api_workers = {f"api-{api}": api for api in range(1, config.api_workers)}
        self._standbys = [f"standby-{rank}" for rank in range(config.tp)]
        self._keeps_standbys = config.keep_standbys
        self._standbys_from = math.inf  # by `time.monotonic`

    @property
    def start_s(self) -> int:
        """About how long the latest complete start took, in seconds, at least one."""
        return math.ceil(self._start_s)

    def start(self) -> None:
        """Start the workers of an epoch, those that take longest first.

        They must not run already.
        """
        self._started_at = time.monotonic()
        self._start_schedulers()
        for name in self._tokenizer_addresses:
            self._start_tokenizer(name)

    def _start_schedulers(self) -> None:
        """Start the schedulers: first those without a standby, which have to import torch."""
        assignments: dict[str, Assignment] = {}
        for rank, standby in enumerate(self._standbys):
            assignment = Assignment(
                f"scheduler-{rank}", _RANK, (self._config, rank, self.addresses)
            )
            if self._supervisor.is_prepared(standby):
                assignments[standby] = assignment
            else:
                self._supervisor.start(assignment.name, assignment.body, *assignment.args)
        self._supervisor.assign(assignments)

    def _start_tokenizer(self, name: str) -> None:
        self._supervisor.start(
            name,
            "minisgl.tokenizer:tokenize_worker",
            self._model,
            self._max_seq_len,
            self._tokenizer_addresses[name],
            self.addresses,
            self._config.tokenizer_options,
        )

    @property
    def _tokenizer_addresses(self) -> dict[str, str]:
        """Where the detokenizer and each tokenizer get messages, by the name of the process."""
        addresses = self.addresses
        tokenizers = zip(addresses.tokenizer_names, addresses.tokenizers, strict=True)
        return {DETOKENIZER: addresses.detokenizer, **dict(tokenizers)}

    def is_replaceable(self, name: str) -> bool:
        """Whether a worker can be replaced while the others go on."""
        return name in self._tokenizer_addresses

    def replace(self, name: str) -> None:
        """Start the successor of a tokenizer or the detokenizer that has ended.

        It is not ready yet. `next_failure` notices when it is, or why it cannot start.
        """
        self._supervisor.remove_one(name)
        life = self.addresses.life_of(name) + 1
        self.addresses = self.addresses.in_life(name, life)
        self._start_tokenizer(name)

    def _add_standbys(self) -> None:
        """Let a process stand by for each scheduler, if that is wanted and it is time."""
        if not self._keeps_standbys or time.monotonic() < self._standbys_from:
            return
        missing = [name for name in self._standbys if not self._supervisor.has_child(name)]
        try:
            for name in missing:
                self._supervisor.start_standby(name, _RANK_IMPORTS)
        except OSError as error:
            self._stop_keeping_standbys(str(error))

    def is_standby(self, name: str) -> bool:
        return name in self._standbys

    def drop_standby(self, failure: Failure) -> None:
        """Forget one that has ended. None is started any more if one could not start."""
        self._supervisor.remove_one(failure.name)
        if failure.is_at_start:
            self._stop_keeping_standbys(failure.reason)
        else:
            self._standbys_from = time.monotonic() + _STANDBYS_AGAIN_AFTER_S
            logger.warning("%s; no request needed it", failure.reason)

    def _stop_keeping_standbys(self, reason: str) -> None:
        self._keeps_standbys = False
        logger.warning("no process stands by from now on: %s", reason)

    def start_api_workers(self, entrances: list[Entrance]) -> None:
        """Start the API processes beside this one, each with its entrance."""
        for name, api in self._api_workers.items():
            self._supervisor.start(
                name,
                "minisgl.server.api_worker:api_worker",
                self._config,
                self.addresses,
                entrances[api],
                has_children=True,  # that parse large bodies
            )

    @property
    def names(self) -> list[str]:
        """Those of all workers but standbys."""
        schedulers = [f"scheduler-{rank}" for rank in range(self._config.tp)]
        return [*schedulers, *self._tokenizer_addresses, *self._api_workers]

    def is_api_worker(self, name: str) -> bool:
        return name in self._api_workers

    def wait_ready(self) -> list[WorkerInfo]:
        """Wait until every worker that was started is ready; return what they say of themselves.

        Raises:
            ConfigError: a worker cannot run with these options or this model.
            EngineFailed: a worker died or was not ready in time; the message names it.
        """
        reports = self._supervisor.wait_ready(self._config.start_timeout_s)
        infos = [decode_info(report.info) for report in reports if report.info]
        if self._keeps_standbys is None:
            schedulers = [info for info in infos if isinstance(info, SchedulerInfo)]
            self._keeps_standbys = any(info.device == "cuda" for info in schedulers)
        self._start_s = time.monotonic() - self._started_at
        self._standbys_from = time.monotonic() + _STANDBYS_AFTER_S
        return infos

    async def next_failure(self) -> Failure:
        """Wait until a child dies, or hangs for `step_timeout_s` and is killed.

        Meanwhile processes that stand by are started. They are children, too.
        """
        config = self._config
        return await self._supervisor.next_failure(
            config.step_timeout_s, config.start_timeout_s, self._add_standbys
        )

    def kill(self) -> None:
        """Kill all children but API processes and those that can take over. Returns at once."""
        self._supervisor.kill(keep=self._kept)

    @property
    def _kept(self) -> set[str]:
        """The children that outlive an epoch.

        One that is not prepared yet does not: it would compete with the next start.
        """
        return {*self._api_workers, *filter(self._supervisor.is_prepared, self._standbys)}

    def end_epoch(self) -> None:
        """Wait until killed workers have ended. The next start is a new epoch."""
        self._supervisor.remove(keep=self._kept)
        self.addresses = self.addresses.in_epoch(self.addresses.epoch + 1)
