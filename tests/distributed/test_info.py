"""Shards: which units each rank has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError

sizes = st.integers(1, 8)


def ranks(size: int) -> list[DistributedInfo]:
    return [DistributedInfo(rank, size) for rank in range(size)]


@given(size=sizes, each=st.integers(0, 50))
def test_shards_are_equal_and_cover_everything_in_order(size: int, each: int) -> None:
    shards = [info.shard(size * each, "units") for info in ranks(size)]
    assert {len(shard) for shard in shards} == {each}
    assert [unit for shard in shards for unit in shard] == list(range(size * each))


@given(size=sizes, total=st.integers(1, 200))
def test_padded_shards_cover_everything_in_order_and_only_the_last_are_short(
    size: int, total: int
) -> None:
    shards = [info.shard_padded(total) for info in ranks(size)]
    assert [unit for shard in shards for unit in shard] == list(range(total))
    full = -(-total // size)
    num_full = total // full
    assert [len(shard) for shard in shards[:num_full]] == [full] * num_full


@given(size=sizes, kv_each=st.integers(1, 4), group=st.integers(1, 4), replicas=st.integers(1, 8))
def test_each_rank_has_the_kv_heads_of_its_query_heads(
    size: int, kv_each: int, group: int, replicas: int
) -> None:
    num_kv_heads = size // replicas if size % replicas == 0 else size * kv_each
    num_heads = num_kv_heads * group * size
    for info in ranks(size):
        heads = info.shard(num_heads, "heads")
        kv_heads = info.shard_kv_heads(num_kv_heads)
        assert {head * num_kv_heads // num_heads for head in heads} == set(kv_heads)


def test_heads_that_cannot_be_divided_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--tp 2 does not divide the model's 9 attention heads"):
        DistributedInfo(0, 2).shard(9, "attention heads")


@pytest.mark.parametrize(("size", "num_kv_heads"), [(2, 3), (4, 3), (8, 6)])
def test_kv_heads_that_fit_no_rank_are_refused_by_name(size: int, num_kv_heads: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp {size} .*{num_kv_heads} key/value heads"):
        DistributedInfo(0, size).shard_kv_heads(num_kv_heads)


@given(size=sizes, experts_each=st.integers(1, 20), columns_each=st.integers(1, 50))
def test_a_rank_has_a_part_of_each_expert_or_with_ep_whole_ones(
    size: int, experts_each: int, columns_each: int
) -> None:
    num_experts = size * experts_each
    width = size * columns_each
    for rank in range(size):
        by_width = DistributedInfo(rank, size)
        assert by_width.shard_experts(num_experts) == range(num_experts)
        assert by_width.shard_expert_columns(width) == by_width.shard(width, "columns")
        by_expert = DistributedInfo(rank, size, ep=True)
        assert by_expert.shard_experts(num_experts) == by_width.shard(num_experts, "experts")
        assert by_expert.shard_expert_columns(width) == range(width)


def test_experts_that_cannot_be_divided_are_refused_by_name() -> None:
    info = DistributedInfo(0, 4, ep=True)
    with pytest.raises(ConfigError, match=r"--tp 4 does not divide the model's 6 experts.*--ep"):
        info.shard_experts(6)
    assert info.shard_expert_columns(7) == range(7)
