"""Attention by our kernels in Triton, over pages; on a CPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="these are kernels of Triton")
import tests.kernel.interpreter  # noqa: F401 - repairs it
from minisgl.attention import triton_backend
from minisgl.checkpoint import AttentionSpec
from minisgl.kernel import attention, gpu
from minisgl.kernel.gpu import prompt_attention
from minisgl.utils.staging import Staging
from tests.attention.test_torch_backend import GRAPHS, MIXED, PLAIN, World

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its tensors lie on the CPU, where kernels run in Triton's interpreter only",
)
SPANS = {
    "decodes": [(9, 10), (31, 32), (0, 1)],
    "prompts": [(0, 7), (0, 30)],
    "chunks": [(5, 17), (0, 3), (40, 41), (30, 65)],
    "decodes and prompts": [(9, 10), (30, 31), (0, 7), (0, 2)],
    "decodes and chunks": [(9, 10), (30, 31), (0, 7), (20, 50), (3, 4)],
    "mixed": MIXED,
}
WINDOW = AttentionSpec(scale=0.4, window=6)
SOFTCAP = AttentionSpec(scale=0.4, softcap=1.5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have several tiles, and tiles have several blocks of keys."""
    monkeypatch.setattr(attention, "triton_kernels_for", lambda x: gpu)
    monkeypatch.setattr(prompt_attention, "_TILES", {256: (16, 16)})
    monkeypatch.setattr(prompt_attention, "_ROOMS", (2, 8))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_slice_attends_to_its_context(spans: list[tuple[int, int]], page_size: int) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=page_size)
    o_TNH = world.attend(1, "triton").double()
    torch.testing.assert_close(o_TNH, world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (5, 5), (34, 2)])
def test_any_number_of_heads_shares_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    """17 have more rows than a tile: it has a token then."""
    world = World(SPANS["chunks"], num_heads, num_kv_heads, page_size=16)
    o_TNH = world.attend(0, "triton").double()
    torch.testing.assert_close(o_TNH, world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("pair", ["triton", "torch,triton", "triton,torch"])
def test_scores_are_what_the_layers_spec_says(spans: list[tuple[int, int]], pair: str) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=4, specs=(WINDOW, SOFTCAP))
    for layer in range(2):
        o_TNH = world.attend(layer, pair).double()
        torch.testing.assert_close(o_TNH, world.dense(layer), atol=2e-5, rtol=0)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_the_last_tokens_of_slices_attend_by_themselves(
    spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent for them goes where that of the step before went, as on a GPU."""
    places: dict[int, Tensor] = {}

    def send(self: Staging, *arrays: Tensor) -> list[Tensor]:
        return [
            places.setdefault(len(array), torch.empty(len(array), dtype=torch.int32)).copy_(
                torch.from_numpy(array)
            )
            for array in arrays
        ]

    monkeypatch.setattr(triton_backend.Staging, "send", send)
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=4)
    o_TNH, o_YNH = world.attend_with_the_last(0, "triton")
    expected_TNH = world.dense()
    torch.testing.assert_close(o_TNH.double(), expected_TNH, atol=2e-5, rtol=0)
    torch.testing.assert_close(o_YNH.double(), expected_TNH[world.last_index()], atol=2e-5, rtol=0)


@pytest.mark.parametrize("pair", ["triton", "triton,triton"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("num_decodes", "spans"), GRAPHS, ids=str)
def test_a_graph_finds_its_prompts_on_the_device(
    num_decodes: int, spans: list[tuple[int, int]], page_size: int, pair: str
) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=page_size)
    o_TNH = world.attend_captured(pair, num_decodes)
    torch.testing.assert_close(o_TNH.double(), world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", [PLAIN, WINDOW], ids=["full", "window"])
def test_many_prompts_with_many_tiles(spec: AttentionSpec) -> None:
    spans = [(3 * i % 40, 3 * i % 40 + 1 + 7 * i % 50) for i in range(12)]
    world = World(spans, num_heads=6, num_kv_heads=2, page_size=4, specs=(spec, spec))
    o_TNH = world.attend(0, "triton").double()
    torch.testing.assert_close(o_TNH, world.dense(0), atol=2e-5, rtol=0)
