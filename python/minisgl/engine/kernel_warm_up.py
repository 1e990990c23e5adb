"""Calls every Triton kernel that steps will launch, while CUDA's compiler is at work.

Triton compiles a kernel when it is first called, in half a second, and keeps it. Each function of
`_CALLS` calls the kernels of one file of `kernel/gpu/`, through what layers, backends and the
sampler call; those of linear layers are in `product_warm_up.py`. A new kernel needs its call; a
test finds the kernels that have none.

Triton compiles a kernel again for other dtypes, for other compile-time constants, for a pointer
that is a multiple of 16 bytes, and for an int that is 1 or a multiple of 16. Other sizes share one
compiled kernel. So the
sizes here are those of the model where they are such constants, and small elsewhere. Where a call
differs from a step's, the kernel of the step is compiled when that runs first (`warm_up.py`).
A call may also be of a kind that the model does not need, as with norms of heads.
"""

# Dimensions: B requests of a step, D model width, F mlp width, H head width, K kv heads,
# L positions of a sequence, M all heads of a token, N query heads, P pages, Q positions of a page,
# R rows of the tables, T tokens of a step, V vocabulary, X a selection out of another dimension:
# parts of the inputs.

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from minisgl.checkpoint import AttentionSpec
from minisgl.config import backend_names
from minisgl.engine.kernel_sizes import KernelSizes, small_size
from minisgl.engine.product_warm_up import (
    call_one_token_products,
    call_tiled_products,
    call_tiled_silu,
    numbers_of_parts,
)
from minisgl.kernel import (
    GroupTensors,
    HeadNorms,
    Rotation,
    add_parts_rms_norm,
    add_rms_norm,
    attend_decode,
    attend_prompts_on_device,
    attend_shared_prefixes,
    choose_scored_tokens,
    choose_tokens,
    look_up,
    parts_rms_norm,
    plan_shared_prefixes,
    rms_norm,
    rotate_and_store,
    route,
    scatter,
    silu_and_mul,
    triton_kernels_for,
)
from minisgl.moe import create_moe_backend, expert_shape

_NUM_THREADS = 4
# Requests times kv heads: so many fill the device without splits, or with few.
_MANY_HEADS = 128
_MANY_PROMPTS = 33  # more than the kernel's variant for few prompts takes
# Experts for each that a token chooses: with so many, all tiles are taken.
_EXPERTS_FOR_EACH = 4


def call_kernels(sizes: KernelSizes) -> None:
    """Return when all kernels are compiled and have run, on streams of their own.

    They take a few megabytes. No other thread may launch kernels of Triton meanwhile, or capture.
    Most of a compilation is the work of LLVM and of other processes, which threads share out.
    """
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="minisgl-triton") as pool:
        list(pool.map(partial(_call_on_stream, sizes), _CALLS))


def _call_on_stream(sizes: KernelSizes, call: Callable[[KernelSizes], None]) -> None:
    stream = torch.cuda.Stream(sizes.device)
    with torch.cuda.device(sizes.device), torch.cuda.stream(stream):
        call(sizes)
    stream.synchronize()


def _norms(sizes: KernelSizes) -> None:
    """Rows of the model's width, also in parts, and of all heads that are normed together."""
    width = sizes.model.width
    eps = sizes.model.norm_eps
    x_TD = sizes.numbers(1, width)
    add_rms_norm(x_TD, sizes.numbers(1, width), sizes.numbers(width), eps)
    for parts in numbers_of_parts(sizes):
        parts_XTD = sizes.floats(parts, 1, width)
        add_parts_rms_norm(parts_XTD, sizes.numbers(1, width), sizes.numbers(width), eps)
        parts_rms_norm(parts_XTD, sizes.numbers(width), eps, sizes.dtype)
    head_dim = sizes.model.head_dim
    for size in (width, sizes.num_heads * head_dim, sizes.num_kv_heads * head_dim):
        rms_norm(sizes.numbers(1, size), sizes.numbers(size), eps)


def _activations(sizes: KernelSizes) -> None:
    width = sizes.mlp_width
    if width is not None and sizes.model.activation == "silu":
        gate_TF, up_TF = sizes.numbers(1, 2 * width).split(width, dim=1)
        silu_and_mul(gate_TF, up_TF)


def _rotations(sizes: KernelSizes) -> None:
    head_dim = sizes.model.head_dim
    qkv_TMH = sizes.numbers(1, sizes.num_heads + 2 * sizes.num_kv_heads, head_dim)
    cos_LH = sizes.numbers(1, head_dim)
    sin_LH = sizes.numbers(1, head_dim)
    weight_H = sizes.numbers(head_dim)
    slot_T = sizes.ints(1).long()
    k_PQKH, v_PQKH = sizes.kv_PQKH()
    rotation = Rotation(cos_LH, sin_LH, sizes.ints(1))
    for norms in (None, HeadNorms(weight_H, weight_H, sizes.model.norm_eps)):
        rotate_and_store(qkv_TMH, norms, rotation, slot_T, k_PQKH, v_PQKH)


def _tables(sizes: KernelSizes) -> None:
    page_table_RP = sizes.page_table_RP()
    token_pool_RL = sizes.ints(1, sizes.rows.num_row_tokens)
    zero_T = sizes.ints(1)
    scatter(token_pool_RL, zero_T, zero_T)
    look_up(zero_T, zero_T, token_pool_RL, page_table_RP, sizes.rows.page_size)
    if "fi" in backend_names(sizes.attn):
        kernels = triton_kernels_for(page_table_RP)
        assert kernels is not None
        kernels.list_pages(zero_T, sizes.ints(2), page_table_RP, zero_T)


def _attention(sizes: KernelSizes) -> None:
    """Each kind of layer, for one request and for many, which kernels divide otherwise."""
    many = -(-_MANY_HEADS // sizes.num_kv_heads)
    kinds = {(spec.window is None, spec.softcap is None): spec for spec in sizes.model.attention}
    for spec in kinds.values():
        for batch_size in (1, many):
            _attend(sizes, spec, batch_size)
        if backend_names(sizes.attn)[0] == "triton":
            for num_prompts in (1, _MANY_PROMPTS):
                _attend_prompts(sizes, spec, num_prompts)


def _attend(sizes: KernelSizes, spec: AttentionSpec, batch_size: int) -> None:
    """Attend as the backend of decodes does; those that are not named have kernels of their own."""
    index_B = sizes.ints(batch_size)
    backend = backend_names(sizes.attn)[-1]
    if backend in ("torch", "triton", "fi"):
        _attend_splits(sizes, spec, index_B)
    if backend == "fi" and spec.window is None and spec.softcap is None:
        _attend_shared_prefixes(sizes, spec, index_B)


def _attend_splits(sizes: KernelSizes, spec: AttentionSpec, index_B: Tensor) -> None:
    """Attend from the first token of the first row, once for each request.

    Args:
        index_B: stands for tokens, for rows and for positions.
    """
    q_BNH = sizes.numbers(len(index_B), sizes.num_heads, sizes.model.head_dim)
    attend_decode(
        q_BNH,
        *sizes.kv_PQKH(),
        sizes.page_table_RP(),
        index_B,
        index_B,
        index_B,
        torch.empty_like(q_BNH),
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
    )


def _attend_prompts(sizes: KernelSizes, spec: AttentionSpec, num_prompts: int) -> None:
    """Attend for a prompt of one token, and for others of none."""
    q_1NH = sizes.numbers(1, sizes.num_heads, sizes.model.head_dim)
    indptr = sizes.ints(num_prompts + 1)
    indptr[1:] = 1
    attend_prompts_on_device(
        q_1NH,
        *sizes.kv_PQKH(),
        sizes.page_table_RP(),
        sizes.ints(1),
        sizes.ints(1),
        indptr,
        torch.empty_like(q_1NH),
        num_tokens=1,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
    )


def _attend_shared_prefixes(sizes: KernelSizes, spec: AttentionSpec, row_B: Tensor) -> None:
    plan = plan_shared_prefixes(
        row_B,
        GroupTensors(row_B, row_B, sizes.ints(2)),
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
    )
    attend_shared_prefixes(
        sizes.numbers(len(row_B), sizes.num_heads, sizes.model.head_dim),
        *sizes.kv_PQKH(),
        sizes.page_table_RP(),
        plan,
        scale=spec.scale,
    )


def _sampling(sizes: KernelSizes) -> None:
    """Logits as the model gives them, and in float32 where they are changed; with filters, too."""
    vocab = sizes.vocab
    model_logits_BV = vocab.pad(sizes.numbers(1, len(vocab.tokens)))
    temperature_B = sizes.floats(1)
    seed_B2 = sizes.ints(1, 2)
    position_B = sizes.ints(1)
    for logits_BV in (model_logits_BV, model_logits_BV.float()):
        for lowest_B in (None, sizes.floats(1)):
            numbers = (lowest_B, temperature_B, seed_B2, position_B)
            if vocab.is_whole:
                choose_tokens(logits_BV, *numbers)
            else:
                choose_scored_tokens(logits_BV, *numbers, vocab.first_token)


def _masks(sizes: KernelSizes) -> None:
    logits_BV = sizes.vocab.pad(sizes.numbers(1, len(sizes.vocab.tokens)))
    no_mask_B = sizes.ints(1) - 1
    sizes.vocab.mask(logits_BV, no_mask_B, sizes.ints(1, -(-sizes.vocab.size // 32)))


def _experts(sizes: KernelSizes) -> None:
    """The router's choice, and the products of one token and of as many as take each tile."""
    model = sizes.model
    shape = expert_shape(model, sizes.info, sizes.dtype)
    if shape is None:
        return
    each = shape.each
    route(sizes.numbers(1, model.num_experts), each, model.normalize_experts)

    backend = create_moe_backend(sizes.device, sizes.dtype, shape)
    num_experts = min(shape.num_experts, _EXPERTS_FOR_EACH * each)
    for num_tokens in backend.nums_of_tokens(num_experts, each):
        # For one token, the width of an expert is a constant of a kernel.
        mlp_width = shape.mlp_width if num_tokens == 1 else small_size(shape.mlp_width)
        x_TD = sizes.numbers(num_tokens, small_size(model.width))
        width = x_TD.shape[1]
        backend.forward(
            x_TD,
            sizes.numbers(num_experts, 2 * mlp_width, width),
            sizes.numbers(num_experts, width, mlp_width),
            sizes.numbers(num_tokens, each),
            sizes.ints(num_tokens, each),
        )


# Each is called on a thread, those first that take longest to compile.
_CALLS: tuple[Callable[[KernelSizes], None], ...] = (
    call_tiled_products,
    _experts,
    _attention,
    _sampling,
    _norms,
    _rotations,
    call_one_token_products,
    call_tiled_silu,
    _tables,
    _activations,
    _masks,
)
