"""Prompts in, tokens and logits out: an engine and a scheduler in one process; and the oracle they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minisgl.core import BatchPlan, FinishReason, SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.message import BackendMsg, DetokenizeMsg, ExitMsg, UserMsg, pack_ids
from minisgl.scheduler import Scheduler, SchedulerConfig

Prompt = list[int]
LOGITS_TOLERANCE = 1e-4
MIN_GAP = 2 * LOGITS_TOLERANCE  # between the oracle's first and second choice, so that the token is beyond doubt


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def random_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Prompt]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=random).tolist() for length in lengths]


def config_of(model: Path, **options: Any) -> SchedulerConfig:
    """A resolved config: float32 on the CPU, with room for a few hundred tokens unless `options` say otherwise."""
    small = {"dtype": "float32", "page_size": 4, "num_pages": 512, "max_running_requests": 32}
    return SchedulerConfig(model=str(model), device="cpu", attn="torch", **{"overlap": False, **small, **options})


class WatchedEngine(Engine):
    """An engine that remembers the logits of every token it chose, by request and position."""

    def __init__(self, config: SchedulerConfig, info: DistributedInfo | None = None, meeting: Path | None = None):
        super().__init__(config, info or DistributedInfo(), meeting)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def _choose(self, plan: BatchPlan, logits_BV: Tensor | None) -> Tensor:
        if logits_BV is not None:
            keys = [(part.req.uid, part.end) for part in plan.sampling]
            self.logits.update(zip(keys, logits_BV.clone(), strict=True))
        return super()._choose(plan, logits_BV)


class MemoryInbox:
    """Hands out what was put in; to a scheduler that would wait for more, the end."""

    def __init__(self) -> None:
        self.msgs: list[BackendMsg] = []

    def receive(self, *, block: bool) -> list[BackendMsg]:
        msgs, self.msgs = self.msgs, []
        return msgs or ([ExitMsg()] if block else [])


class MemoryOutbox:
    def __init__(self) -> None:
        self.msgs: list[DetokenizeMsg] = []

    def send(self, msgs: list[DetokenizeMsg]) -> None:
        self.msgs += msgs


@dataclass
class Answer:
    """Tokens, and row by row the logits from which they were chosen."""

    tokens: list[int] = field(default_factory=list)
    logits_TV: Tensor | None = None
    finish: FinishReason | None = None
    num_cached: int = 0


def collect(msgs: list[DetokenizeMsg], engine: WatchedEngine) -> dict[int, Answer]:
    """The answer to each uid."""
    answers: dict[int, Answer] = {}
    for msg in msgs:
        assert msg.error is None, msg.error
        answer = answers.setdefault(msg.uid, Answer())
        answer.tokens += [] if msg.token is None else [msg.token]
        answer.finish, answer.num_cached = msg.finish, msg.num_cached
    for uid, answer in answers.items():
        positions = sorted(position for owner, position in engine.logits if owner == uid)[: len(answer.tokens)]
        if positions:
            answer.logits_TV = torch.stack([engine.logits[uid, position] for position in positions])
    return answers


class Host:
    """A scheduler over an engine, one for as many rounds of prompts as are asked."""

    def __init__(self, engine: WatchedEngine, config: SchedulerConfig) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self._engine = engine
        self.scheduler = Scheduler(config, engine, self.inbox, self.outbox)
        self._num_asked = 0

    def ask(self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]) -> list[Answer]:
        """Send all prompts at once and step until all are answered; checks who owns which page after each step."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        uids = range(self._num_asked, self._num_asked + len(prompts))
        self._num_asked += len(prompts)
        self._engine.logits.clear()
        self.outbox.msgs.clear()
        self.inbox.msgs = [UserMsg(*args) for args in zip(uids, map(pack_ids, prompts), each, strict=True)]
        while self.inbox.msgs or not self.scheduler.is_idle:
            self.scheduler.step()
            self.scheduler.check_integrity()
        answers = collect(self.outbox.msgs, self._engine)
        return [answers[uid] for uid in uids]


class Oracle:
    """transformers, one prompt at a time; remembers its answers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}

    def answer(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens and their logits_TV. Asserts that rounding cannot change a token."""
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(prompt, num_tokens)
        return self._known[key]

    def _generate(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], Tensor]:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits_TV = torch.cat(output.logits)
        best, second = logits_TV.topk(2).values.unbind(dim=1)
        assert (best - second).min() > MIN_GAP, "the oracle hesitates: choose other weights or prompts"
        return output.sequences[0, len(prompt) :].tolist(), logits_TV


def assert_equals_oracle(oracle: Oracle, prompts: list[Prompt], answers: list[Answer]) -> None:
    """Every token equal, every logit close."""
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logits_TV = oracle.answer(prompt, len(answer.tokens))
        assert answer.tokens == tokens, f"a prompt of {len(prompt)} tokens"
        assert answer.logits_TV is not None
        torch.testing.assert_close(answer.logits_TV, logits_TV, atol=LOGITS_TOLERANCE, rtol=0)
