"""An engine whose memory is full in a step frees what the step held; all others are answered."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Batch, BatchPlan, Req, ReqSlice
from minisgl.errors import StepOutOfMemory
from minisgl.layers import Context
from minisgl.message import UserMsg, pack_ids
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, Prompt, WatchedEngine, config_of, greedy, random_prompts

OPTIONS = {"page_size": 4, "num_pages": 64, "max_prefill_length": 24}
PROMPTS = random_prompts([17, 5, 30, 9], VOCAB_SIZE)
NUM_TOKENS = 8


class FullMemory:
    """The forward function of an engine's model, which fails at some calls as torch does.

    Attributes:
        activations: what failed calls had allocated.
    """

    def __init__(
        self, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch, fails_at: set[int]
    ) -> None:
        self.activations: list[weakref.ref[Tensor]] = []
        self._forward = engine._model.forward
        self._fails_at = fails_at
        self._num_calls = 0
        monkeypatch.setattr(engine._model, "forward", self)

    def __call__(self, batch: Batch, context: Context) -> Tensor:
        self._num_calls += 1
        hidden_YD = self._forward(batch, context)
        if self._num_calls in self._fails_at:
            self.activations.append(weakref.ref(hidden_YD))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return hidden_YD


def plan_of(prompt: Prompt) -> BatchPlan:
    params = greedy(NUM_TOKENS)
    req = Req(0, np.array(prompt, dtype=np.int32), params, len(prompt) + NUM_TOKENS, seed=0)
    req.row = 0
    return BatchPlan([ReqSlice(req, 0, len(prompt), samples=True)])


def test_what_a_failed_step_held_is_free_when_its_error_is_raised(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = WatchedEngine(config_of(checkpoint("llama"), **OPTIONS))
    memory = FullMemory(engine, monkeypatch, fails_at={1})
    with pytest.raises(StepOutOfMemory, match=r"Tried to allocate 2\.00 GiB") as failure:
        engine.launch(engine.prepare(plan_of(PROMPTS[0])))

    [activation] = memory.activations
    assert activation() is None
    assert failure.value.__context__ is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails_at", [{1}, {2}, {3}, {5}, {2, 3}])
def test_other_requests_are_answered_as_if_nothing_had_failed(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    fails_at: set[int],
) -> None:
    config = config_of(checkpoint("llama"), overlap=overlap, **OPTIONS)
    engine = WatchedEngine(config)
    expected = Host(engine, config).ask(PROMPTS, greedy(NUM_TOKENS))

    host = Host(engine, config)
    FullMemory(engine, monkeypatch, fails_at)
    host.inbox.msgs = [
        UserMsg(uid, pack_ids(prompt), greedy(NUM_TOKENS)) for uid, prompt in enumerate(PROMPTS)
    ]
    while host.inbox.msgs or not host.scheduler.is_idle:
        host.scheduler.step()
        host.scheduler.check_integrity()

    tokens: dict[int, list[int]] = {uid: [] for uid in range(len(PROMPTS))}
    for msg in host.outbox.msgs:
        tokens[msg.uid] += msg.tokens
    ended = [msg.uid for msg in host.outbox.msgs if msg.error]
    finished = [msg.uid for msg in host.outbox.msgs if msg.finish]
    assert len(ended) == len(fails_at)
    assert sorted(ended + finished) == [0, 1, 2, 3]
    for uid in range(len(PROMPTS)):
        known = expected[uid].tokens[: len(tokens[uid])]
        assert tokens[uid] == (known if uid in ended else expected[uid].tokens)
    cache = host.scheduler.cache
    assert cache.num_available == cache.num_pages
