"""Prompts in, tokens and logits out: an engine and a scheduler in one process."""

# Dimensions: B requests of a step, T tokens of a step, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.config import SchedulerConfig
from minisgl.core import FinishReason, SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine, LaunchedStep, SampledStep
from minisgl.message import DetokenizeMsg, EngineStats, ExitMsg, SchedulerMsg, UserMsg, pack_ids
from minisgl.scheduler import Scheduler
from minisgl.scheduler.grammars.pending import GrammarTools

Prompt = list[int]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def random_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Prompt]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=random).tolist() for length in lengths]


def config_of(model: Path, **options: Any) -> SchedulerConfig:
    """A resolved config: float32 on the CPU, with a small pool; `options` override it."""
    small = {
        "dtype": "float32",
        "page_size": 4,
        "num_pages": 512,
        "max_running_requests": 32,
        "max_prefill_length": 8192,
    }
    return SchedulerConfig(
        model=str(model),
        device="cpu",
        attn="torch",
        **{"overlap": False, "seed": 0, "target_itl_ms": 0, **small, **options},
    )


class WatchedEngine(Engine):
    """An engine that remembers the logits of every token it chose, by request and position."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: DistributedInfo | None = None,
        rendezvous: Path | None = None,
    ):
        self.logits: dict[tuple[int, int], Tensor] = {}
        super().__init__(config, info or DistributedInfo(), rendezvous)
        self.logits.clear()  # of the warm-up

    def sample(self, launched: LaunchedStep) -> SampledStep:
        logits_BV = launched.sampling_inputs.logits_BV
        if logits_BV is not None:
            logits_BV = logits_BV.clone()  # sampling masks them
            for i, req_slice in enumerate(launched.sampling_slices):
                self.logits[req_slice.req.uid, req_slice.end] = logits_BV[i]
        return super().sample(launched)


class MemoryInbox:
    """Hands out what was put in. A scheduler that would wait for more gets an ExitMsg."""

    def __init__(self) -> None:
        self.msgs: list[SchedulerMsg] = []

    def receive(self, *, block: bool) -> list[SchedulerMsg]:
        msgs, self.msgs = self.msgs, []
        if block and not msgs:
            return [ExitMsg()]
        return msgs

    def post(self, msg: SchedulerMsg) -> None:
        self.msgs.append(msg)


class MemoryOutbox:
    def __init__(self) -> None:
        self.msgs: list[DetokenizeMsg] = []

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
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
        answer.tokens += msg.tokens
        answer.finish = msg.finish
        answer.num_cached = msg.num_cached
    for uid, answer in answers.items():
        positions = sorted(position for owner, position in engine.logits if owner == uid)
        answered = positions[: len(answer.tokens)]
        if answered:
            answer.logits_TV = torch.stack([engine.logits[uid, position] for position in answered])
    return answers


class Host:
    """A scheduler over an engine, for any number of rounds of prompts."""

    def __init__(self, engine: WatchedEngine, config: SchedulerConfig) -> None:
        self.inbox = MemoryInbox()
        self.outbox = MemoryOutbox()
        self._engine = engine
        limits = engine.limits
        tools = GrammarTools.of(config, limits.vocab_size, limits.eos_ids, leads=False)
        self._compiler = tools.compiler
        self.scheduler = Scheduler(config, engine, self.inbox, self.outbox)
        self._num_asked = 0

    def ask(
        self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]
    ) -> list[Answer]:
        """Send all prompts at once, and step until all are answered; check integrity each step."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        self._compile_grammars(each)
        uids = range(self._num_asked, self._num_asked + len(prompts))
        self._num_asked += len(prompts)
        self._engine.logits.clear()
        self.outbox.msgs.clear()
        self.inbox.msgs = [
            UserMsg(*args) for args in zip(uids, map(pack_ids, prompts), each, strict=True)
        ]
        while self.inbox.msgs or not self.scheduler.is_idle:
            self.scheduler.step()
            self.scheduler.check_integrity()
        answers = collect(self.outbox.msgs, self._engine)
        return [answers[uid] for uid in uids]

    def _compile_grammars(self, each: list[SamplingParams]) -> None:
        """Make grammars known, as trials would: all requests are then admitted at once."""
        known = self.scheduler.grammars.known
        for grammar in {params.grammar for params in each if params.grammar}:
            if grammar not in known:
                known.add(grammar, [self._compiler.compile(grammar)], num_bytes=0)
