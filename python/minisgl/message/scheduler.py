"""Messages to schedulers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import Grammar, SamplingParams
from minisgl.message.base import BaseMsg


class UserMsg(BaseMsg, frozen=True):
    """Tokenizer → scheduler 0: a tokenized request.

    input_ids: packed by `pack_ids`; the scheduler refuses an empty prompt.
    """

    uid: int
    input_ids: bytes
    sampling: SamplingParams


class AbortMsg(BaseMsg, frozen=True):
    """API process → tokenizer → scheduler 0 → ranks: end this request, which it cannot overtake.

    The tokenizer drops a request that still waits there, and answers it. The detokenizer
    sends its own after a stop text, and for an answer whose beginning is lost. Unknown and finished
    uids are ignored.
    """

    uid: int


class ExitMsg(BaseMsg, frozen=True):
    """Tokenizer → scheduler 0 → ranks: end the loop."""


class FlushCacheMsg(BaseMsg, frozen=True):
    """API process → tokenizer → scheduler 0 → ranks: drop cached prefixes that no request uses.

    The next `EngineStats` say how many tokens that were.
    """

    uid: int


class NewDetokenizerMsg(BaseMsg, frozen=True):
    """API process → tokenizer → scheduler 0 → ranks: outputs go to the detokenizer's successor.

    Each API process sends it through each tokenizer, before it sends any request that relies on it.

    Attributes:
        life: how often the detokenizer was replaced in this epoch.
    """

    life: int


class GrammarVerdictMsg(BaseMsg, frozen=True):
    """Scheduler 0 → itself → ranks: the trial of a grammar has ended.

    Attributes:
        number: of the grammar, as all ranks count them.
        error: why it is refused, or was not tried to the end; None if it is accepted.
        num_bytes: memory that it takes when it is compiled.
        is_lasting: whether the error is remembered; else its requests get a 503, and the next one
            has it tried again.
    """

    number: int
    error: str | None = None
    num_bytes: int = 0
    is_lasting: bool = True


class GrammarCompiledMsg(BaseMsg, frozen=True):
    """Scheduler 0 → itself → ranks: it has compiled a grammar, whose requests go on, or cannot.

    Attributes:
        error: why it cannot, which ends the requests; the next one has it tried again.
        is_refused: whether the grammar is to blame for an error; else its requests get a 503.
    """

    number: int
    error: str | None = None
    is_refused: bool = True


class ForgetGrammarMsg(BaseMsg, frozen=True):
    """Scheduler 0 → itself → ranks: a grammar takes too much memory, as it has measured.

    Attributes:
        uids: requests that end with it. Finished ones are ignored.
        error: why they end.
    """

    grammar: Grammar
    uids: tuple[int, ...] = ()
    error: str = ""


class StepCostsMsg(BaseMsg, frozen=True):
    """Scheduler 0 → itself → ranks: what steps cost, as measured.

    Attributes:
        seconds: the fields of `StepCosts`, in order.
    """

    seconds: tuple[float, float, float, float, float, float]


SchedulerMsg: TypeAlias = (
    UserMsg
    | AbortMsg
    | FlushCacheMsg
    | NewDetokenizerMsg
    | GrammarVerdictMsg
    | GrammarCompiledMsg
    | ForgetGrammarMsg
    | StepCostsMsg
    | ExitMsg
)


class BatchSchedulerMsg(BaseMsg, frozen=True):
    """Messages that a scheduler gets before one step.

    Scheduler 0 → every other rank, once a step: what scheduler 0 has received before it. `LLM` →
    scheduler 0: what it has posted since its last step.
    """

    msgs: list[SchedulerMsg]


class MatchState(BaseMsg, frozen=True):
    """Where the match of an answer stands after a sampled token and what is forced after it.

    Attributes:
        forced: tokens that are appended without a step each.
        is_complete: whether the answer ends here.
        error: why the grammar cannot be followed any further; the answer ends.
    """

    forced: list[int] = msgspec.field(default_factory=list)
    is_complete: bool = False
    error: str | None = None


class MatchStatesMsg(BaseMsg, frozen=True):
    """Scheduler 0 → every other rank, after a step whose answers follow grammars: what counts.

    Attributes:
        states: by uid, of all matches that the step has advanced.
    """

    states: dict[int, MatchState]


class StepDigestMsg(BaseMsg, frozen=True):
    """Scheduler 0 → every other rank, once a step, after its `BatchSchedulerMsg`: what it plans.

    Attributes:
        number: of the step.
        num_tokens: that it computes.
        slices: a hash of who computes what, and which decodes share prefixes.
        tables: a checksum of all that was written to the device's tables, up to this step.
    """

    number: int
    num_requests: int = 0
    num_tokens: int = 0
    slices: int = 0
    tables: int = 0


LeaderMsg: TypeAlias = BatchSchedulerMsg | StepDigestMsg | MatchStatesMsg
