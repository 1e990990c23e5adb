"""What a step computes, in a few numbers: ranks that plan different steps notice it.

Every rank of a tensor-parallel group plans each step by itself. Ranks that launched different steps
would wait for each other without end, or add up what does not belong together. So rank 0 sends the
digest of a step to the others as soon as it has planned it, and they compare it with their own
before they launch the step.

A digest has the requests of the step with their positions, in their order, and all that was ever
written to the tables of the device: pages, tokens that the host knew, copies of rows. Tokens that a
step samples are broadcast by rank 0, and so need not be compared.

It is made while the device may wait, so it loops over the requests of a step in comprehensions
alone.
"""

from __future__ import annotations

import zlib

import msgspec

from minisgl.core import BatchPlan, TableWrites
from minisgl.errors import EngineFailed
from minisgl.message import StepDigestMsg


class StepDigests:
    """Makes the digests of one rank's steps, one after the other."""

    def __init__(self) -> None:
        self._tables = 0  # checksum of all table writes so far

    def next(self, number: int, plan: BatchPlan | None, num_decodes: int) -> StepDigestMsg:
        """The digest of a step.

        Args:
            number: of the step, or of the one that comes next if there is no plan.
            num_decodes: leading slices that are known to have one token.
        """
        if plan is None:
            return StepDigestMsg(number, tables=self._tables)
        slices = plan.slices
        uids = [req_slice.req.uid for req_slice in slices]
        ends = [req_slice.end for req_slice in slices]
        others = slices[num_decodes:]
        starts = [req_slice.start for req_slice in others]
        self._tables = _checksum(plan.writes, self._tables)
        return StepDigestMsg(
            number,
            num_requests=len(slices),
            num_tokens=num_decodes + sum(map(len, others)),
            num_shared_tokens=plan.num_shared_tokens,
            slices=hash((*uids, *ends, *starts)),  # of integers: equal in all processes
            tables=self._tables,
        )


def _checksum(writes: TableWrites, before: int) -> int:
    """Of what is written to the tables, in order, after what was written before."""
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
