"""One rank's engine: how it starts, and how it ends.

    model_loader.py  the model and its weights, on the device of this rank
    pool_size.py     how many pages of KV fit beside them; on a GPU the largest step is tried
    model_runner.py  the pool, the tables and the graphs are made
    first_steps.py   on a GPU, what no later step shall do for the first time

How it steps is in `model_runner.py`.
"""

# Dimensions: B requests of a step, D model width.

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from minisgl.config import EngineConfig
from minisgl.core import ReqSlice
from minisgl.distributed import DistributedInfo
from minisgl.engine.first_steps import first_choices, first_plans
from minisgl.engine.forward_output import ForwardOutput
from minisgl.engine.memory import out_of_memory_is_explained, reserve_pinned_memory
from minisgl.engine.model_loader import load_model
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.pool_size import fit_limits
from minisgl.engine.sampler import SamplingInputs
from minisgl.engine.sampling_batch import BatchSamplingArgs
from minisgl.engine.steps import LaunchedStep, PreparedStep

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
        with out_of_memory_is_explained("making the KV cache"):
            super().__init__(config, loaded, limits)
        if loaded.device.type == "cuda":
            with out_of_memory_is_explained("running the first steps"):
                self.run_first_steps(config)
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

    def run_first_steps(self, config: EngineConfig) -> None:
        """Do what no later step shall do for the first time; see `first_steps.py`.

        What it writes lies in the padding page, and in the token pool where requests will write.
        """
        started = time.monotonic()
        if self._device.type == "cuda":
            reserve_pinned_memory()
        model = self._loaded.config
        nums_of_tokens: list[int] = []
        if model.num_experts:
            nums_of_tokens = self.context.moe_backend.nums_of_tokens(
                model.num_experts, model.experts_per_token
            )
        num_steps = 0
        for plan in first_plans(config, self.limits, nums_of_tokens):
            if self._graphs is None or self._graphs.find_key(plan) is None:
                _read(self.sample(self.launch(PreparedStep(plan, plan.writes))))
                num_steps += 1
        for slices in first_choices(self.limits):
            _read(self.sample(self._launch_choice(slices)))
        logger.debug("%d first steps in %.2f s", num_steps, time.monotonic() - started)

    @torch.inference_mode()
    def _launch_choice(self, slices: list[ReqSlice]) -> LaunchedStep:
        """A step of slices that sample, without a model: their hidden states are zero."""
        places = [self._token_place(req_slice) for req_slice in slices]
        hidden_BD = torch.zeros(
            len(slices), self._loaded.config.width, dtype=self._loaded.dtype, device=self._device
        )
        inputs = SamplingInputs(
            self._model.logits(hidden_BD),
            BatchSamplingArgs.of(slices, self._staging),
            torch.tensor(places, dtype=torch.int32, device=self._device),
        )
        return LaunchedStep(slices, inputs)

    def _token_place(self, req_slice: ReqSlice) -> int:
        """Where in the token pool the token after a slice stands."""
        return req_slice.row * self.limits.num_row_tokens + req_slice.end

    def close(self) -> None:
        """Free the device's memory, and leave the tensor-parallel group. To be called once."""
        comm = self._loaded.comm
        super().close()
        comm.close()


def _read(output: ForwardOutput) -> None:
    """Wait for all that a step gives."""
    output.wait()
    output.logprobs()
    output.prompt_logprobs()
    output.embeddings()
