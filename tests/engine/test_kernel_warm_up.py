"""Every Triton kernel of a step is called once before the first step.

No GPU is needed: which variant of a kernel a call launches is known without one.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo, SingleCommunicator
from minisgl.engine import kernel_warm_up, product_warm_up
from minisgl.engine.kernel_sizes import KernelSizes
from minisgl.engine.limits import RowLimits
from minisgl.engine.warm_up import run_warm_up
from minisgl.kernel import (
    GroupTensors,
    add_parts_rms_norm,
    attend_shared_prefixes,
    gpu,
    gpu_linear,
    gpu_linear_in_parts,
    gpu_linear_silu,
    parts_rms_norm,
    plan_shared_prefixes,
)
from minisgl.kernel.gpu import launch
from minisgl.layers import Context, MoELayer, VocabShard
from minisgl.moe import FusedMoeBackend, fused
from tests.checkpoints import ARCHITECTURES, CONTEXT
from tests.distributed.groups import Alone
from tests.engine.harness import WatchedEngine, config_of
from tests.engine.test_warm_up import in_the_interpreter
from tests.kernel.launches import Launches
from tests.layers.sources import RandomSource

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a GPU")
PAGE_SIZE = 4
ATTENDED = 2048  # numbers of all query heads of a wide model
EAGER = {"cuda_graph_max_bs": 0, "max_prefill_length": 10, "max_running_requests": 5}


def take_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU are taken for those of a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "_options", lambda device: {"PDL": False})
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "_is_hopper_or_later", lambda device: True)
    monkeypatch.setattr(launch, "_num_processors", lambda device: 132)
    monkeypatch.setattr(launch, "_shared_bytes", lambda device: 232_448)
    monkeypatch.setattr(kernel_warm_up, "create_moe_backend", lambda *_: FusedMoeBackend())
    monkeypatch.setattr(gpu.attention, "_PROGRAMS", 528)
    monkeypatch.setattr(product_warm_up, "can_have_cuda_kernels", lambda x: True)


def sizes_of(model: Path, attn: str = "fi", dtype: torch.dtype = torch.float32) -> KernelSizes:
    config = ModelConfig.from_folder(model)
    return KernelSizes(
        config,
        DistributedInfo(),
        VocabShard(config.vocab_size, SingleCommunicator()),
        RowLimits(PAGE_SIZE, CONTEXT),
        attn,
        dtype,
        torch.device("cpu"),
    )


def wide_sizes(folder: Path, width: int, mlp_width: int) -> KernelSizes:
    """Of a model so wide that its products of some tokens take small tiles."""
    sizes = sizes_of(folder, dtype=torch.bfloat16)
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": ATTENDED // 16}
    return replace(sizes, model=replace(sizes.model, width=width, mlp_width=mlp_width, **heads))


def call_all(sizes: KernelSizes) -> None:
    for call in kernel_warm_up._CALLS:
        call(sizes)


def launched_kernels() -> set[str]:
    """The kernels that functions of `kernel/gpu/` launch, as kernel[grid](...)."""
    names = set()
    for file in Path(gpu.__file__).parent.glob("*.py"):
        if file.name == "launch.py":  # which launches what the others give it
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                if isinstance(kernel, ast.Name):
                    names.add(kernel.id)
    return names


def test_every_kernel_is_called(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new kernel is missing here until `kernel_warm_up.py` calls it."""
    take_for_a_gpu(monkeypatch)
    launches = Launches(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        call_all(sizes_of(checkpoint("qwen3_moe"), dtype=dtype))
    call_all(sizes_of(checkpoint("qwen3")))
    call_all(sizes_of(checkpoint("qwen3"), "triton"))
    call_all(wide_sizes(checkpoint("qwen3"), 1024, 3072))
    assert launches.take().keys() == launched_kernels()


@pytest.mark.parametrize(
    ("width", "mlp_width", "num_ranks"), [(1024, 3072, 1), (2048, 8192, 4), (2560, 9728, 1)]
)
def test_products_of_some_tokens_meet_no_other_variant(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    mlp_width: int,
    num_ranks: int,
) -> None:
    """On four ranks gate and up are too small for tiles of both halves, but not for others.

    The weights of the last model would have tiles of rows if there were a compiler of CUDA.
    """
    take_for_a_gpu(monkeypatch)
    monkeypatch.setattr(product_warm_up, "can_have_cuda_kernels", lambda x: False)
    monkeypatch.setattr("minisgl.kernel.gpu_products.cuda_kernels_for", lambda x: None)
    launches = Launches(monkeypatch)
    sizes = wide_sizes(checkpoint("qwen3"), width, mlp_width)
    call_all(replace(sizes, info=DistributedInfo(0, num_ranks)))
    called = launches.take()

    output_OI = sizes.numbers(width, ATTENDED // num_ranks)
    gate_up_UI = sizes.numbers(2 * mlp_width // num_ranks, width)
    qkv_OI = sizes.numbers(2 * ATTENDED // num_ranks, width)
    norm_D = sizes.numbers(width)
    for num_tokens in (2, 3, 16, 17, 64, 65, 128, 200, 256, 300):
        x_TD = sizes.numbers(num_tokens, width)
        for bias_O in (None, sizes.numbers(len(qkv_OI))):
            gpu_linear(x_TD, qkv_OI, bias_O)
        gpu_linear_silu(x_TD, gate_up_UI)
        x_TI = sizes.numbers(num_tokens, output_OI.shape[1])
        parts_XTD = gpu_linear_in_parts(x_TI, output_OI, None) if num_ranks == 1 else None
        if parts_XTD is not None:
            add_parts_rms_norm(parts_XTD, x_TD, norm_D, sizes.model.norm_eps)
            parts_rms_norm(parts_XTD, norm_D, sizes.model.norm_eps, sizes.dtype)
        else:
            gpu_linear(x_TI, output_OI, None)
    of_steps = launches.take()
    assert "_tiled_linear" in of_steps
    for name, variants in of_steps.items():
        assert variants <= called[name], name


def test_a_norm_of_a_large_weights_parts_meets_no_other_variant(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from `csrc/row_tiles.cu`, which has no kernel of Triton."""
    take_for_a_gpu(monkeypatch)
    cuda = SimpleNamespace(row_tiles=lambda x_TI, weight_OI, bias_O, parts_XTO, rows: None)
    monkeypatch.setattr("minisgl.kernel.gpu_products.cuda_kernels_for", lambda x: cuda)
    launches = Launches(monkeypatch)
    sizes = wide_sizes(checkpoint("qwen3"), 2560, 9728)
    call_all(sizes)
    called = launches.take()

    for num_tokens, num_parts in ((17, 6), (64, 6), (65, 2), (128, 2)):
        parts_XTD = gpu_linear_in_parts(
            sizes.numbers(num_tokens, 9728), sizes.numbers(2560, 9728), None
        )
        assert parts_XTD is not None
        assert len(parts_XTD) == num_parts
        norm_D = sizes.numbers(2560)
        x_TD = sizes.numbers(num_tokens, 2560)
        add_parts_rms_norm(parts_XTD, x_TD, norm_D, sizes.model.norm_eps)
        parts_rms_norm(parts_XTD, norm_D, sizes.model.norm_eps, sizes.dtype)
    of_steps = launches.take()
    assert of_steps.keys() == {"_rms_norm"}
    assert of_steps["_rms_norm"] <= called["_rms_norm"]


def test_kernels_are_compiled_side_by_side(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sizes: KernelSizes) -> None:
        raise ValueError

    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    sizes = sizes_of(checkpoint("qwen3"))
    monkeypatch.setattr(kernel_warm_up, "_CALLS", [lambda _: both.wait()] * 2)
    kernel_warm_up.call_kernels(sizes)
    monkeypatch.setattr(kernel_warm_up, "_CALLS", [fail])
    with pytest.raises(ValueError):
        kernel_warm_up.call_kernels(sizes)


@pytest.mark.parametrize("attn", ["torch", "triton"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_steps_of_a_model_meet_no_other_variant(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, arch: str, attn: str
) -> None:
    """But those of products, for which a CPU has kernels of its own."""
    with monkeypatch.context() as patch:
        in_the_interpreter(patch)
        config = replace(config_of(checkpoint(arch), **EAGER), attn=attn)
        engine = WatchedEngine(config)
        launches = Launches(patch, runs={"_look_up", "_scatter", "_best_of_split", "_best_of_all"})
        run_warm_up(engine, config, engine._loaded)
        of_steps = launches.take()
    assert {"_best_of_split", "_rotate_and_store", "_attend_split"} <= of_steps.keys()
    assert ("_attend_tile" in of_steps) == (attn == "triton")

    with monkeypatch.context() as patch:
        take_for_a_gpu(patch)
        launches = Launches(patch)
        call_all(sizes_of(checkpoint(arch), attn))
        called = launches.take()
    for name, variants in of_steps.items():
        assert variants <= called[name], name


def test_decodes_that_share_prefixes_meet_no_other_variant(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_a_gpu(monkeypatch)
    launches = Launches(monkeypatch)
    sizes = sizes_of(checkpoint("qwen3"), dtype=torch.bfloat16)
    call_all(sizes)
    called = launches.take()

    model = sizes.model
    row_B = sizes.ints(40)
    plan = plan_shared_prefixes(
        row_B,
        GroupTensors(row_B, row_B, sizes.ints(6)),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
    )
    q_BNH = sizes.numbers(40, model.num_heads, model.head_dim)
    attend_shared_prefixes(q_BNH, *sizes.kv_PQKH(), sizes.page_table_RP(), plan, scale=0.1)
    of_step = launches.take()
    assert of_step.keys() == {"_plan", "_attend_part"}
    for name, variants in of_step.items():
        assert variants <= called[name], name


def test_a_rank_with_whole_experts_meets_no_other_variant(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_a_gpu(monkeypatch)
    backend = FusedMoeBackend(None, ep=2)
    monkeypatch.setattr(kernel_warm_up, "create_moe_backend", lambda *_: backend)
    launches = Launches(monkeypatch)
    sizes = sizes_of(checkpoint("qwen3_moe"))
    model = sizes.model
    call_all(replace(sizes, info=DistributedInfo(1, 2, ep=True)))
    called = launches.take()

    comm = Alone(1, 2, ep=True)
    layer = MoELayer(
        model.width,
        model.expert_width,
        model.num_experts,
        model.experts_per_token,
        comm,
        normalize=True,
    )
    layer.load(RandomSource(), "mlp")
    nothing: Any = None
    ctx = Context(nothing, nothing, nothing, nothing, backend)
    for num_tokens in (*range(1, 40), 100, 300, 3000):
        layer.forward(torch.zeros(num_tokens, model.width), ctx)
    of_layer = launches.take()
    assert {"_route", "_down_rows", "_multiply", "_sum_of_pairs"} <= of_layer.keys()
    for name, variants in of_layer.items():
        assert variants <= called[name], name


def test_no_variant_depends_on_how_long_a_sequence_may_be(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short the pool shortens it, and is only made when kernels are compiled."""
    take_for_a_gpu(monkeypatch)
    launches = Launches(monkeypatch)
    for attn in ("fi", "torch", "triton"):
        variants = []
        for num_pages in (16, 10, 1):
            sizes = sizes_of(checkpoint("qwen3"), attn)
            rows = RowLimits(PAGE_SIZE, num_pages * PAGE_SIZE)
            call_all(replace(sizes, rows=rows))
            variants.append(launches.take())
        assert variants == variants[:1] * 3


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_calls_read_and_write_what_they_made(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """They run in Triton's interpreter."""
    take_for_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu.attention, "_PROGRAMS", 20)
    monkeypatch.setattr(kernel_warm_up, "_MANY_HEADS", 12)  # contexts of a request have one split
    for module in (fused, gpu.expert_pairs):
        monkeypatch.setattr(module, "MOST_PAIRS_AT_ONCE", 512)  # more than the tiles need
    for attn in ("fi", "triton"):
        call_all(sizes_of(checkpoint(arch), attn))
