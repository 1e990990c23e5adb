"""What a step computes, as a few numbers by which ranks notice that they plan different steps.

Every rank of a tensor-parallel group plans each step by itself. Ranks that launched different steps
would wait for each other without end, or add up what does not belong together. So rank 0 sends the
digest of a step to the others as soon as it has planned it. They compare it with their own before
they launch the step.

A digest covers the slices of prompts and of several tokens, which requests have begun or stopped
running, which running ones compute nothing in this step, and which decodes share prefixes. It also
covers all that was ever written to the tables of the device: pages, tokens that the host knew,
copies of rows. All other running requests compute one token each. Their positions need not be
compared: they follow from where each request began, and from the steps since. Nor need sampled
tokens be compared: ranks choose them together (`VocabShard.agree`).

It is made while the device may wait, so it takes no time for requests that merely continue.
"""

from __future__ import annotations

import zlib

import msgspec

from minisgl.core import BatchPlan, ReqSlice, TableWrites
from minisgl.errors import EngineFailed
from minisgl.message import StepDigestMsg
from minisgl.scheduler.decode import RunningPlan


class StepDigests:
    """Makes the digests of one rank's steps, one after the other."""

    def __init__(self) -> None:
        self._tables = 0  # checksum of all table writes so far

    def next(
        self, number: int, plan: BatchPlan | None, running: RunningPlan, history: int
    ) -> StepDigestMsg:
        """The digest of a step.

        Args:
            number: of the step, or of the one that comes next if there is no plan.
            running: the part of the plan that is about running requests.
            history: of the `DecodeManager`.
        """
        num_regular = len(running.decodes)  # running requests that compute one token
        longer: list[ReqSlice] = []
        groups: list[tuple[int, ...]] = []
        if plan is not None:
            longer = plan.slices[num_regular:]
            groups = [(group.num_tokens, *group.members) for group in plan.prefix_groups]
            self._tables = _checksum(plan.writes, self._tables)
        chunks = [(each.req.uid, each.start, each.end) for each in longer]
        return StepDigestMsg(
            number,
            num_requests=num_regular + len(longer),
            num_tokens=num_regular + sum(map(len, longer)),
            # Of integers: equal in all processes.
            slices=hash((history, tuple(running.idle), tuple(chunks), tuple(groups))),
            tables=self._tables,
        )


def _checksum(writes: TableWrites, before: int) -> int:
    """Update the checksum of all table writes by those of one step."""
    result = zlib.crc32(writes.page_index.data, before)
    result = zlib.crc32(writes.pages.data, result)
    result = zlib.crc32(writes.token_index.data, result)
    result = zlib.crc32(writes.tokens.data, result)
    for copy in writes.copies:
        numbers = b"%d %d %d " % (copy.source, copy.target, copy.num_tokens)
        result = zlib.crc32(numbers, result)
    return result


def check_digest(own: StepDigestMsg, leaders: StepDigestMsg) -> None:
    """Compare a rank's digest of a step with rank 0's.

    Raises:
        EngineFailed: they differ; names the step and what differs.
    """
    if own == leaders:
        return
    theirs = msgspec.structs.asdict(leaders)
    differences = [
        f"{name} {_shown(name, value)} here, {_shown(name, theirs[name])} on rank 0"
        for name, value in msgspec.structs.asdict(own).items()
        if value != theirs[name]
    ]
    raise EngineFailed(f"the ranks plan step {own.number} differently: {'; '.join(differences)}")


def _shown(name: str, value: int) -> str:
    return f"{value:#x}" if name in ("slices", "tables") else str(value)
