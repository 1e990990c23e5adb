"""The arguments of FlashAttention and TensorRT-LLM, and pairs of backends.

Stand-ins for the libraries attend by these arguments, on any machine.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.attention import check_attention, fa_backend, trtllm_backend
from minisgl.attention import paged as paged_module
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BatchPlan
from minisgl.errors import ConfigError
from minisgl.utils.staging import FixedStaging
from tests.attention.test_torch_backend import GRAPHS, MIXED, PLAIN, World

SPANS = {
    "decodes": [(9, 10), (31, 32), (0, 1)],
    "prompts": [(0, 7), (0, 30)],
    "chunks": [(5, 17), (0, 3), (40, 41)],
    "decodes and prompts": [(9, 10), (30, 31), (0, 7), (0, 2)],
    "decodes and chunks": [(9, 10), (30, 31), (0, 7), (20, 50), (3, 4)],
    "mixed": MIXED,
}


LIBRARIES = ("flash_attn", "flash_attn_interface", "sgl_kernel", "flashinfer")
SUBMODULES = ("flash_attn.cute", "sgl_kernel.flash_attn", "flashinfer.decode", "flashinfer.prefill")
Context = Callable[[int], tuple[Tensor, Tensor]]


def attend(
    q: Tensor,
    queries: Tensor,
    context: Context,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float | None = None,
) -> Tensor:
    """Slice by slice, in float64; `context` gives the keys and values of a slice.

    What stands before the first slice gets no numbers.
    """
    outputs = [torch.full_like(q[: int(queries[0])], math.nan)]
    for i, (start, end) in enumerate(zip(queries[:-1].tolist(), queries[1:].tolist(), strict=True)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in context(i))
        distance = torch.arange(len(k) - (end - start), len(k))[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | ((distance > window_left) & (window_left >= 0))
        scores = torch.einsum("tnh,lnh->ntl", q[start:end].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        outputs.append(torch.einsum("ntl,lnh->tnh", weights, v).to(q.dtype))
    return torch.cat(outputs)


def flash_scores(
    *,
    causal: bool,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, 0),
    softcap: float = 0.0,
) -> dict[str, float]:
    """The options of FlashAttention as those of `attend`."""
    assert causal
    assert window_size[1] == 0
    return {"scale": softmax_scale, "window_left": window_size[0], "softcap": softcap}


def attend_within_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return attend(
        q,
        cu_seqlens_q,
        lambda i: (k[slice(*cu_seqlens_k[i : i + 2])], v[slice(*cu_seqlens_k[i : i + 2])]),
        **flash_scores(**options),
    )


def paged(k: Tensor, v: Tensor, lengths: Tensor, pages_BP: Tensor) -> Context:
    def context(i: int) -> tuple[Tensor, Tensor]:
        length = int(lengths[i])
        pages = pages_BP[i, : -(-length // k.shape[1])].long()
        return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]

    return context


def version_4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    if "page_table" not in options:
        return attend_within_batch(q, k, v, **options), None
    queries = options.pop("cu_seqlens_q")
    lengths = options.pop("seqused_k")
    assert options.pop("max_seqlen_q") >= int(queries.diff().max())
    assert options.pop("max_seqlen_k") >= int(lengths.max())
    context = paged(k, v, lengths, options.pop("page_table"))
    return attend(q, queries, context, **flash_scores(**options)), None


def version_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    **options: Any,
) -> Tensor:
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    context = paged(k, v, cache_seqlens, page_table)
    return attend(q, cu_seqlens_q, context, **flash_scores(**options))


def trtllm_decode(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    workspace: Tensor,
    pages_BP: Tensor,
    lengths: Tensor,
    max_keys: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    kv_layout: str,
) -> Tensor:
    assert (bmm2_scale, kv_layout) == (1.0, "NHD")
    assert q.is_contiguous()
    context = paged(*kv, lengths, pages_BP)
    return attend(q, torch.arange(len(q) + 1), context, scale=bmm1_scale, window_left=window_left)


def trtllm_context(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    workspace: Tensor,
    pages_BP: Tensor,
    lengths: Tensor,
    max_queries: int,
    max_keys: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    queries: Tensor,
    keys: Tensor,
    *,
    window_left: int,
    kv_layout: str,
) -> Tensor:
    assert keys.tolist() == [0, *lengths.int().cumsum(0).tolist()]
    assert batch_size == len(lengths)
    context = paged(*kv, lengths, pages_BP)
    return attend(q, queries, context, scale=bmm1_scale, window_left=window_left)


@pytest.fixture(
    params=["flash_attn.cute", "flash_attn_interface", "sgl_kernel.flash_attn", "trtllm"]
)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend's name, whose only library is a stand-in."""
    libraries = {
        "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=version_4),
        "flash_attn_interface": SimpleNamespace(
            flash_attn_varlen_func=attend_within_batch, flash_attn_with_kvcache=version_3
        ),
    }
    libraries["sgl_kernel.flash_attn"] = libraries["flash_attn_interface"]
    for library, module in libraries.items():
        monkeypatch.setitem(sys.modules, library.split(".")[0], None)
        monkeypatch.setitem(sys.modules, library, module if library == request.param else None)
    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_decode)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    prefill = SimpleNamespace(trtllm_batch_context_with_kv_cache=trtllm_context)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(trtllm_backend, "_WORKSPACE_BYTES", 1)  # the stand-ins need none
    return "trtllm" if request.param == "trtllm" else "fa"


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("pair", ["{0}", "{0},torch", "torch,{0}", "{0},{0}"])
def test_each_slice_attends_to_its_context(
    spans: list[tuple[int, int]], pair: str, name: str
) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=16)
    torch.testing.assert_close(
        world.attend(1, pair.format(name)).double(), world.dense(), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("pair", ["{0}", "{0},torch", "torch,{0}"])
def test_the_last_tokens_of_slices_attend_by_themselves(
    spans: list[tuple[int, int]], pair: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are sent go where those before them went, as on a GPU."""
    monkeypatch.setattr(paged_module, "Staging", lambda device, size: FixedStaging(size))
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=16)
    o_TNH, o_YNH = world.attend_with_the_last(0, pair.format(name))
    expected_TNH = world.dense()
    torch.testing.assert_close(o_TNH.double(), expected_TNH, atol=2e-5, rtol=0)
    torch.testing.assert_close(o_YNH.double(), expected_TNH[world.last_index()], atol=2e-5, rtol=0)


WINDOW = AttentionSpec(scale=0.4, window=6)
SOFTCAP = AttentionSpec(scale=0.4, softcap=1.5)
GPU = torch.device("cuda")


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("pair", ["{0}", "torch,{0}"])
def test_scores_are_what_the_layers_spec_says(
    spans: list[tuple[int, int]], pair: str, name: str
) -> None:
    specs = (WINDOW, WINDOW if name == "trtllm" else SOFTCAP)
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=16, specs=specs)
    for layer in range(2):
        o_TNH = world.attend(layer, pair.format(name)).double()
        torch.testing.assert_close(o_TNH, world.dense(layer), atol=2e-5, rtol=0)


def test_a_soft_cap_is_refused_by_trtllm() -> None:
    message = "does not support a soft cap, which layer 1 of the model needs; use fa or fi or torch"
    with pytest.raises(ConfigError, match=message):
        check_attention("torch,trtllm", GPU, 64, [PLAIN, SOFTCAP])


@pytest.mark.parametrize("pair", ["fi", "fi,torch", "torch,fi"])
def test_heads_that_flashinfer_does_not_take_are_named(pair: str) -> None:
    for head_dim in (64, 128, 256):
        check_attention(pair, GPU, head_dim, [PLAIN])
    message = "takes heads of 64, 128, 256 numbers, and this model's have 80; use --attn triton"
    with pytest.raises(ConfigError, match=f"--attn fi {message}"):
        check_attention(pair, GPU, 80, [PLAIN])


def test_heads_that_are_too_wide_for_a_gpu_are_named() -> None:
    check_attention("torch", GPU, 512, [PLAIN])
    with pytest.raises(ConfigError, match="at most 512 numbers, and this model's have 520; use --"):
        check_attention("torch", GPU, 520, [PLAIN])
    check_attention("torch", torch.device("cpu"), 520, [PLAIN])


@pytest.mark.parametrize("pair", ["{0}", "{0},{0}"])
@pytest.mark.parametrize(("num_decodes", "spans"), GRAPHS, ids=str)
def test_a_graph_finds_its_lengths_on_the_device(
    num_decodes: int, spans: list[tuple[int, int]], pair: str, name: str
) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=16)
    o_TNH = world.attend_captured(pair.format(name), num_decodes)
    torch.testing.assert_close(o_TNH.double(), world.dense(), atol=2e-5, rtol=0)


def refuse(name: str, message: str, page_size: int = 16) -> None:
    world = World([(0, 1)], num_heads=4, num_kv_heads=2, page_size=page_size)
    with pytest.raises(ConfigError, match=message):
        world.backend(name)


def hide(libraries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were not installed. Python finds submodules that were imported without them."""
    imported = [name for name in sys.modules if name.split(".")[0] in libraries]
    for name in (*libraries, *imported):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("imported", [(), SUBMODULES], ids=["never", "imported_before"])
def test_what_is_missing_is_named_with_its_command(
    imported: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in imported:
        stand_in = SimpleNamespace(
            trtllm_batch_decode_with_kv_cache=None, trtllm_batch_context_with_kv_cache=None
        )
        monkeypatch.setitem(sys.modules, module, stand_in)
    hide(LIBRARIES, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ampere = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    refuse(
        "fa",
        r"--attn fa needs FlashAttention: pip install 'minisgl\[fa\]' "
        r"\(flash_attn.cute: .*; flash_attn_interface: .*; sgl_kernel.flash_attn: .*\)$",
    )
    refuse("fi", r"--attn fi needs FlashInfer: pip install 'minisgl\[cuda\]'")
    refuse("torch,trtllm", r"--attn trtllm needs FlashInfer: pip install 'minisgl\[cuda\]'")
    refuse("torch,none", "--attn must be of .*, got 'none'")
    refuse(
        "torch,torch,torch",
        "one backend, or one for prompts and one for decodes, got 'torch,torch,torch'",
    )


def test_why_flash_attention_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(module: str) -> None:
        raise ImportError(f"{module}.so:\n  undefined symbol\n")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"flash_attn.cute: flash_attn.cute.so: undef") as failure:
        fa_backend._load()
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ["trtllm"], indirect=True)
def test_what_trtllm_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    refuse(name, "--attn trtllm needs a --page-size of .*, got 4", page_size=4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for given in (name, f"{name},torch"):
        refuse(
            given,
            "--attn trtllm only decodes on this GPU: give another for prompts, as in fi,trtllm$",
        )


def test_decodes_are_those_at_the_head() -> None:
    world = World([(9, 10), (0, 7), (3, 4)], num_heads=2, num_kv_heads=2, page_size=4)
    plan = BatchPlan(world.slices)
    assert [
        plan.num_decodes,
        BatchPlan(world.slices[1:]).num_decodes,
        BatchPlan(world.slices[:1]).num_decodes,
    ] == [
        1,
        0,
        1,
    ]
