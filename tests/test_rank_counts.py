"""How many ranks can divide a model. The oracle is what the ranks themselves say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.rank_counts import can_divide, check_rank_count
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_folder(tiny_checkpoint("llama", tmp_path_factory.mktemp("dense")))


def ranks_accept(info: DistributedInfo, model: ModelConfig) -> bool:
    try:
        info.shard_heads(model.num_heads)
        info.shard_kv_heads(model.num_kv_heads)
        if model.dense_layers:
            info.shard(model.mlp_width, "outputs of gate_proj")
        if model.num_experts:
            info.shard_experts(model.num_experts)
            info.shard_expert_columns(model.expert_width)
    except ConfigError:
        return False
    return True


@given(
    count=st.integers(1, 24),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    width=st.integers(1, 64),
    experts=st.integers(0, 16),
    has_dense_layers=st.booleans(),
    ep=st.booleans(),
)
def test_what_is_refused_early_is_what_ranks_refuse(
    dense: ModelConfig,
    count: int,
    kv_heads: int,
    group: int,
    width: int,
    experts: int,
    has_dense_layers: bool,
    ep: bool,
) -> None:
    model = replace(
        dense,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        mlp_width=width,
        expert_width=2 * width,
        num_experts=experts,
        dense_layers=frozenset({0} if has_dense_layers else ()),
    )
    assert can_divide(count, model, ep=ep) == ranks_accept(DistributedInfo(0, count, ep), model)


def test_the_numbers_that_can_divide_are_named(dense: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"^--tp must divide .*, as 1, 2, 4 do, got 1000$"):
        check_rank_count(1000, dense, ep=False)


def test_no_size_in_a_config_makes_the_check_long(dense: ModelConfig) -> None:
    """A list of 2**28 numbers would fill the memory."""
    huge = replace(dense, num_heads=2**28, num_kv_heads=2**28, mlp_width=2**28)
    with pytest.raises(ConfigError, match="1024 do, got 1000"):
        check_rank_count(1000, huge, ep=False)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"tp": 1000}, "got 1000"),
        ({"tp": 2, "ep": True}, "--ep needs a model with experts, LlamaForCausalLM has 0"),
        ({"ep": True}, "--ep needs --tp to be >= 2, got 1"),
    ],
)
def test_an_llm_starts_no_process_for_ranks_that_cannot_divide_its_model(
    options: dict[str, Any], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.llm.rank_group.Supervisor", None)
    with pytest.raises(ConfigError, match=refusal):
        LLM(tiny_checkpoint("llama", tmp_path), **options)
