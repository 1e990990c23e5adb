"""One rank's engine: how it starts, and how it ends.

    model_loader.py  the model and its weights, on the device of this rank
    pool_size.py     how many pages of KV fit beside them; on a GPU the largest step is tried
    model_runner.py  the pool, the tables and the graphs are made
    warm_up.py       on a GPU, the steps that run once before the engine serves

`model_runner.py` runs the steps.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.distributed import DistributedInfo
from minisgl.engine.memory import LOWER_STEPS, out_of_memory_is_explained
from minisgl.engine.model_loader import load_model
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.pool_size import fit_limits
from minisgl.engine.warm_up import run_warm_up

logger = logging.getLogger(__name__)


class Engine(ModelRunner):
    """Runs the steps of one rank, over as large a pool as its memory allows.

    Args:
        config: resolved; `model` is a local folder.
        rendezvous: where the ranks of the group find each other; see `create_communicator`.

    Raises:
        ConfigError, CheckpointError: the options do not fit the model, or its files are unusable.
    """

    def __init__(
        self, config: EngineConfig, info: DistributedInfo, rendezvous: Path | None = None
    ) -> None:
        started = time.monotonic()
        loaded = load_model(config, info, rendezvous)
        logger.debug("the model is ready")
        limits = fit_limits(config, loaded)
        logger.debug("it fits %d pages", limits.num_pages)
        with out_of_memory_is_explained("making the KV cache", LOWER_STEPS):
            super().__init__(config, loaded, limits)
        if loaded.device.type == "cuda":
            with out_of_memory_is_explained("warming up", LOWER_STEPS):
                run_warm_up(self, config, loaded)
        logger.info(
            "%s on %s in %s: %d pages of %d tokens, context %d, ready after %.1f s",
            loaded.config.architecture,
            loaded.device,
            config.dtype,
            self.limits.num_pages,
            self.limits.page_size,
            self.limits.max_seq_len,
            time.monotonic() - started,
        )

    def close(self) -> None:
        """Free the device's memory, and leave the tensor-parallel group. To be called once."""
        comm = self._loaded.comm
        super().close()
        comm.close()
