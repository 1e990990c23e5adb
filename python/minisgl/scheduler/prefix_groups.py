"""Which decodes of a step attend to a prefix together.

A prefix that decodes share is read once for all of them. The prefix tree says which share one:

    system prompt ─┬─ tools A ─┬─ request 1      group 1: with tools A, requests 1 to 40
                   │           ├─ …
                   │           └─ request 40
                   ├─ tools B ─── request 41     too few: as if they had no tools in common
                   ├─ …                          group 2: the system prompt, requests 41 to 60
                   └─ request 60
    another text ───── request 61                in no group
"""

from __future__ import annotations

from minisgl.core import FEWEST_IN_GROUP, PrefixGroup, ReqSlice
from minisgl.kvcache import SharedPrefix

# To read shared tokens once pays if all reads of them in a layer are at least so many bytes, plus
# this part of the bytes that are read in any case. It takes a kernel more, and what that finds is
# added. It pays for 32 decodes that share 1,024 tokens of 4 KiB and have 300 each of their own.
# Measured on an H200 (0013).
_LEAST_BYTES = 7 * 2**24
_PART_OF_OWN = 0.25


def group_by_prefix(
    decodes: list[ReqSlice], prefixes: list[SharedPrefix], kv_bytes: int
) -> list[PrefixGroup]:
    """Give each decode the longest prefix that it shares with enough others.

    A group of its own reads the prefix above once more, which the group above reads, too. So who
    would save fewer reads than that by a longer prefix stays in the group above, if it has enough
    others.

    Args:
        decodes: each of one token, of a request that has locked what it shares.
        prefixes: of all that have locked them, whether their decodes are here or not.
        kv_bytes: of a token's keys and values in a layer, as in `EngineLimits`.

    Returns:
        none, if to read what they share once would take longer than to read it for each decode.
    """
    index_of = {decode.req.uid: i for i, decode in enumerate(decodes)}
    left = set(index_of)
    groups = []
    for prefix in sorted(prefixes, key=lambda prefix: -prefix.num_tokens):
        uids = left & prefix.locked_by
        if len(uids) >= FEWEST_IN_GROUP and _deserves_group(prefix, uids, left):
            groups.append(PrefixGroup(prefix.num_tokens, sorted([index_of[uid] for uid in uids])))
            left -= uids
    num_reads = sum([group.num_tokens * len(group.members) for group in groups])
    num_own = sum([decode.end for decode in decodes]) - num_reads
    pays = kv_bytes * (num_reads - _PART_OF_OWN * num_own) >= _LEAST_BYTES
    return groups if pays else []


def _deserves_group(prefix: SharedPrefix, uids: set[int], left: set[int]) -> bool:
    """Whether decodes are a group of their own, or part of one with a shorter prefix."""
    above = prefix.above
    if above is None:
        return True
    num_saved = len(uids) * (prefix.num_tokens - above.num_tokens)
    num_others = len(left & above.locked_by) - len(uids)
    if num_others < FEWEST_IN_GROUP:  # they are no group without these
        return num_saved >= num_others * above.num_tokens
    return num_saved >= above.num_tokens
