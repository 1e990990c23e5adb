"""Rotary embeddings against transformers', from every spelling that config.json has had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minisgl.checkpoint import ModelConfig, RotaryConfig
from minisgl.errors import CheckpointError
from minisgl.kernel import rotate
from minisgl.layers import RotaryEmbedding, RotaryTables, get_rope

HEAD_DIM = 32
POSITIONS = 600
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 4 * HEAD_DIM,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


def old(**scaling: Any) -> dict[str, Any]:
    """As up to transformers 4: theta beside the scaling."""
    return {"rope_theta": 5e3, "rope_scaling": scaling}


def new(**parameters: Any) -> dict[str, Any]:
    """As from transformers 5."""
    return {"rope_parameters": {"rope_theta": 5e3, **parameters}}


SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta alone": {"rope_theta": 5e5},
    "scaling that is null": {"rope_theta": 5e3, "rope_scaling": None},
    "new default": new(rope_type="default"),
    "old linear by type": old(type="linear", factor=4.0),
    "old linear by rope_type": old(rope_type="linear", factor=4.0),
    "new linear": new(rope_type="linear", factor=4.0),
    "old llama3": old(rope_type="llama3", **LLAMA3),
    "new llama3": new(rope_type="llama3", **LLAMA3),
    "old yarn by type": old(type="yarn", **YARN),
    "new yarn": new(rope_type="yarn", **YARN),
    "both yarn spellings": old(type="yarn", rope_type="yarn", **YARN),
    "yarn with an attention factor": new(rope_type="yarn", attention_factor=0.7, **YARN),
    "yarn with scales": new(rope_type="yarn", mscale=1.5, mscale_all_dim=0.8, **YARN),
    "yarn with one scale only": new(rope_type="yarn", mscale=1.5, **YARN),
    "yarn with other bounds": new(rope_type="yarn", beta_fast=16.0, beta_slow=2.0, **YARN),
    "yarn with fractional bounds": new(rope_type="yarn", truncate=False, **YARN),
    "yarn with bounds in the other order": new(
        rope_type="yarn", beta_fast=1.0, beta_slow=8.0, **YARN
    ),
    "yarn with a bound before the first dimension": new(rope_type="yarn", beta_slow=64.0, **YARN),
    "yarn with equal bounds": new(
        rope_type="yarn", beta_fast=2.0, beta_slow=2.0, truncate=False, **YARN
    ),
    "yarn of a small factor": new(
        rope_type="yarn", factor=1.0, original_max_position_embeddings=512
    ),
    "yarn of the whole context": old(type="yarn", factor=2.0),
    "llama3 of the whole context": new(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "two spellings that differ": {
        **old(type="linear", factor=4.0),
        "rope_parameters": {"rope_theta": 7e4, "rope_type": "yarn", **YARN},
    },
    "two spellings, and a theta in the new one only": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"},
    },
    "an empty old spelling beside the new one": {
        "rope_scaling": {},
        **new(rope_type="yarn", **YARN),
    },
    "a theta beside the new spelling's": {
        "rope_theta": 7e4,
        **new(rope_type="linear", factor=4.0),
    },
    "a theta beside parameters without one": {
        "rope_theta": 7e4,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    },
    "the original context beside the parameters": {
        "original_max_position_embeddings": 64,
        **new(rope_type="yarn", **YARN),
    },
    "no partial rotation": {"partial_rotary_factor": None, **new(rope_type="default")},
}


def read(spelling: dict[str, Any], folder: Path) -> RotaryConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **spelling}))
    rope = ModelConfig.from_folder(folder).attention[0].rope
    assert rope is not None
    return rope


def numbers(num_heads: int) -> Tensor:
    return torch.randn(
        POSITIONS, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(num_heads)
    )


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_rotated_heads_equal_those_of_transformers(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    position_T = torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(0)).int()
    q_TNH = numbers(4)
    k_TKH = numbers(2)

    oracle = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps({**BASE, **spelling}))))
    cos, sin = oracle(q_TNH, position_T[None])
    expected = apply_rotary_pos_emb(
        q_TNH.transpose(0, 1)[None], k_TKH.transpose(0, 1)[None], cos, sin
    )

    rope = get_rope(read(spelling, tmp_path), POSITIONS, torch.float32)
    for x_TNH, rotated in zip((q_TNH, k_TKH), expected, strict=True):
        torch.testing.assert_close(
            rotate(x_TNH, rope.forward(position_T)), rotated[0].transpose(0, 1), atol=2e-4, rtol=0
        )


def test_the_spellings_of_one_rope_mean_the_same(tmp_path: Path) -> None:
    assert read(SPELLINGS["old yarn by type"], tmp_path) == read(SPELLINGS["new yarn"], tmp_path)
    assert read(SPELLINGS["old llama3"], tmp_path) == read(SPELLINGS["new llama3"], tmp_path)
    assert read(SPELLINGS["old linear by type"], tmp_path) == read(
        SPELLINGS["new linear"], tmp_path
    )


def test_kinds_differ_from_each_other(tmp_path: Path) -> None:
    """So that the test above cannot pass by ignoring the kind."""
    names = ("new default", "new linear", "new llama3", "new yarn")
    ropes = [get_rope(read(SPELLINGS[name], tmp_path), POSITIONS, torch.float32) for name in names]
    rotated = [
        rotate(numbers(1), rope.forward(torch.arange(POSITIONS, dtype=torch.int32)))
        for rope in ropes
    ]
    for index, one in enumerate(rotated):
        assert all((one - other).abs().max() > 0.1 for other in rotated[:index])


def test_divided_frequencies_are_the_default_ones_over_their_divisors() -> None:
    half = HEAD_DIM // 2
    divisors = torch.linspace(1, 8, half)
    config = RotaryConfig(HEAD_DIM, 5e3, 512, "divided", {"divisors": divisors.tolist()})
    x_TNH = numbers(2)
    position_T = torch.arange(POSITIONS, dtype=torch.int32)

    rotated = rotate(x_TNH, get_rope(config, POSITIONS, torch.float32).forward(position_T))

    frequency = 5e3 ** (-torch.arange(half, dtype=torch.float64) / half) / divisors.double()
    angle_T1X = torch.outer(position_T.double(), frequency)[:, None]
    a, b = x_TNH.double().chunk(2, dim=-1)
    expected = torch.cat(
        (a * angle_T1X.cos() - b * angle_T1X.sin(), b * angle_T1X.cos() + a * angle_T1X.sin()),
        dim=-1,
    )
    torch.testing.assert_close(rotated.double(), expected, atol=2e-4, rtol=0)


def test_llama3_written_as_divisors_is_llama3() -> None:
    """GGUF files hold what converters compute: default frequency over stretched frequency."""
    default = 5e3 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**{**BASE, **SPELLINGS["new llama3"]}), "cpu"
    )
    scaling = {"divisors": (default / stretched).tolist()}
    llama3 = get_rope(RotaryConfig(HEAD_DIM, 5e3, 512, "llama3", LLAMA3), POSITIONS, torch.float32)
    divided = get_rope(
        RotaryConfig(HEAD_DIM, 5e3, 512, "divided", scaling), POSITIONS, torch.float32
    )
    x_TNH = numbers(2)
    position_T = torch.arange(POSITIONS, dtype=torch.int32)
    torch.testing.assert_close(
        rotate(x_TNH, divided.forward(position_T)),
        rotate(x_TNH, llama3.forward(position_T)),
        atol=2e-4,
        rtol=0,
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "su"])
def test_an_unknown_kind_is_named_with_those_there_are(kind: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"config.json: rope_type '{kind}' is not supported; there is .*yarn"
    ):
        get_rope(RotaryConfig(HEAD_DIM, 1e4, 512, kind), 10, torch.float32)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("linear", "factor"),
        ("llama3", "low_freq_factor"),
        ("yarn", "factor"),
        ("divided", "divisors"),
    ],
)
def test_a_missing_parameter_is_named(kind: str, missing: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != missing}
    with pytest.raises(
        CheckpointError, match=f"config.json: rope_type '{kind}' needs .* '{missing}'"
    ):
        get_rope(RotaryConfig(HEAD_DIM, 1e4, 512, kind, scaling), 10, torch.float32)


def test_a_parameter_that_is_null_is_an_error_of_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="factor"):
        get_rope(RotaryConfig(HEAD_DIM, 1e4, 512, "linear", {"factor": None}), 10, torch.float32)


def test_bfloat16_heads_stay_bfloat16() -> None:
    rope = get_rope(RotaryConfig(HEAD_DIM, 1e4, 512), POSITIONS, torch.bfloat16)
    x_TNH = numbers(2)
    position_T = torch.arange(POSITIONS, dtype=torch.int32)
    rotated = rotate(x_TNH.bfloat16(), rope.forward(position_T))
    exact = rotate(
        x_TNH,
        get_rope(RotaryConfig(HEAD_DIM, 1e4, 512), POSITIONS, torch.float32).forward(position_T),
    )
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float(), exact, atol=5e-2, rtol=0)


def test_a_table_is_the_same_however_many_positions_are_computed_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RotaryConfig(HEAD_DIM, 1e4, 512)
    position_T = torch.arange(POSITIONS, dtype=torch.int32)
    at_once = rotate(numbers(2), get_rope(config, POSITIONS, torch.float32).forward(position_T))
    monkeypatch.setattr("minisgl.layers.rotary._POSITIONS_AT_A_TIME", 7)
    in_parts = rotate(numbers(2), get_rope(config, POSITIONS, torch.float32).forward(position_T))
    assert POSITIONS % 7 != 0
    assert torch.equal(in_parts, at_once)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor in float32 that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.num_elements = max(self.num_elements, made.numel())
        return made


def test_what_a_long_table_is_made_of_is_smaller_than_the_table() -> None:
    num_positions = 2**19
    with _Largest() as largest:
        RotaryEmbedding(torch.ones(1), 1.0, num_positions, torch.bfloat16)
    assert 0 < largest.num_elements <= 2 * num_positions / 8


def test_layers_with_equal_rotations_share_a_table() -> None:
    tables = RotaryTables(POSITIONS, torch.float32)
    first = tables.table(RotaryConfig(HEAD_DIM, 1e4, 512, "linear", {"factor": 2.0}), HEAD_DIM)
    equal = tables.table(RotaryConfig(HEAD_DIM, 1e4, 512, "linear", {"factor": 2.0}), HEAD_DIM)
    other = tables.table(RotaryConfig(HEAD_DIM, 1e4, 512, "linear", {"factor": 4.0}), HEAD_DIM)
    assert first is equal
    assert first is not other


def test_a_layer_without_rope_turns_nothing() -> None:
    x_TNH = numbers(2)
    table = RotaryTables(POSITIONS, torch.float32).table(None, HEAD_DIM)
    assert torch.equal(
        rotate(x_TNH, table.forward(torch.arange(POSITIONS, dtype=torch.int32))), x_TNH
    )
