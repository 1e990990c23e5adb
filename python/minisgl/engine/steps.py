"""A step between its phases.

    BatchPlan ─ prepare ─▶ PreparedStep ─ launch ─▶ LaunchedStep ─ sample ─▶ SampledStep

The phases are methods of `ModelRunner`. These objects hold a graph's key, never the graph: a
traceback may keep a step alive, and NCCL cannot leave its group while a graph that uses it is
alive. They are not frozen, because a frozen dataclass takes several times as long to make, and the
device waits meanwhile.
`SampledStep` is in `sampled_step.py`. Next to read: `model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core import BatchPlan, ReqSlice, TableWrites
from minisgl.engine.graphs.key import GraphKey
from minisgl.engine.graphs.runner import PreparedReplay
from minisgl.engine.prompt_outputs import PromptOutputs
from minisgl.engine.sampler import SamplingInputs


@dataclass(slots=True)
class PreparedStep:
    """A plan whose host work is done, as far as possible before the previous step is sampled.

    Attributes:
        writes: table writes to be launched before the step, without those that the replay does
            itself.
        replay: of a captured step. None for an eager step, whose host work is done when it is
            launched.
    """

    plan: BatchPlan
    writes: TableWrites
    replay: PreparedReplay | None = None


@dataclass(slots=True)
class LaunchedStep:
    """A step whose logits the device computes.

    Attributes:
        sampling_slices: the slices that sample, in the order of the plan.
        sampling_inputs: what their tokens are chosen from, with padding.
        graph_key: of a captured step, which may also have a graph that chooses the tokens.
        prompt_outputs: logprobs and embeddings of prompts, if a request wants some.
    """

    sampling_slices: list[ReqSlice]
    sampling_inputs: SamplingInputs
    graph_key: GraphKey | None = None
    prompt_outputs: PromptOutputs | None = None
