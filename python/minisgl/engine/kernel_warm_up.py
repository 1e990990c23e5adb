"""Calls every Triton kernel that steps will launch, while CUDA's compiler is at work.

Triton compiles a kernel when it is first called, in half a second, and keeps it. Each function of
`_CALLS` calls the kernels of one file of `kernel/gpu/`, through what layers, backends and the
sampler call. A new kernel needs its call here; a test finds the kernels that have none.

Triton compiles anew for other dtypes, for other compile-time constants, for a pointer that 16 bytes
divide, and for an int that is 1 or that 16 divides; other sizes it does not tell apart. So the
sizes here are those of the model where they are such constants, and small elsewhere. Where a call
differs from a step's, the kernel of the step is compiled when that runs first (`warm_up.py`).
A call may also be of a kind that the model does not need, as with norms of heads.
"""

# Dimensions: B requests of a step, D model width, F mlp width, H head width, I inputs of a linear
# layer, K kv heads, L positions of a sequence, M all heads of a token, N query heads, O outputs of
# a linear layer, P pages, Q positions of a page, R rows of the tables, T tokens of a step,
# V vocabulary, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.checkpoint import AttentionSpec, ModelConfig
from minisgl.config import backend_names
from minisgl.distributed import DistributedInfo
from minisgl.engine.limits import RowLimits
from minisgl.kernel import (
    GroupTensors,
    HeadNorms,
    LinearTile,
    Rotation,
    add_parts_rms_norm,
    add_rms_norm,
    attend_decode,
    attend_shared_prefixes,
    choose_scored_tokens,
    choose_tokens,
    gpu_linear,
    gpu_linear_silu,
    gpu_linear_tile,
    look_up,
    plan_shared_prefixes,
    rms_norm,
    rotate_and_store,
    route,
    scatter,
    silu_and_mul,
    tiled_sizes,
    triton_kernels_for,
)
from minisgl.kvcache import MHAKVCache
from minisgl.layers import VocabShard
from minisgl.moe import create_moe_backend, expert_shape

_NUM_THREADS = 4
_ALIGNED = 16  # what Triton asks whether it divides an int
# Requests times kv heads: so many fill the device without splits, or with few.
_MANY_HEADS = 128
# Experts for each that a token chooses: with so many, all tiles are taken.
_EXPERTS_FOR_EACH = 4


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """What the steps of a rank call kernels with.

    Attributes:
        rows: for the model's context; the pool, which may be smaller, is made later.
        attn: the attention backends, as in `EngineConfig`.
    """

    model: ModelConfig
    info: DistributedInfo
    vocab: VocabShard
    rows: RowLimits
    attn: str
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        return len(self.info.shard_heads(self.model.num_heads))

    @property
    def num_kv_heads(self) -> int:
        return len(self.info.shard_kv_heads(self.model.num_kv_heads))

    @property
    def mlp_width(self) -> int | None:
        """The width of an MLP without experts on this rank; None if all layers have experts."""
        if not self.model.dense_layers:
            return None
        return len(self.info.shard(self.model.mlp_width, "columns of an mlp"))

    def numbers(self, *shape: int) -> Tensor:
        """Zeros in the dtype of activations."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """Zeros of this shape, in the memory of one row.

        Its rows are 0 numbers apart, which Triton takes for a multiple of 16, as those of nearly
        all models are.
        """
        return self.numbers(1, inputs).expand(outputs, inputs)

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def page_table_RP(self) -> Tensor:
        return self.ints(1, self.rows.num_row_pages)

    def kv_PQKH(self) -> tuple[Tensor, Tensor]:
        """Pools of a page."""
        pool = MHAKVCache(
            1,
            self.num_kv_heads,
            self.model.head_dim,
            1,
            self.rows.page_size,
            self.dtype,
            self.device,
        )
        return pool.k_cache(0), pool.v_cache(0)


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
    """Rows of the model's width, and of all heads where those are normed together."""
    width = sizes.model.width
    eps = sizes.model.norm_eps
    x_TD = sizes.numbers(1, width)
    add_rms_norm(x_TD, sizes.numbers(1, width), sizes.numbers(width), eps)
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
    """Each kind of layer, for one request and for many: their contexts are split otherwise."""
    many = -(-_MANY_HEADS // sizes.num_kv_heads)
    kinds = {(spec.window is None, spec.softcap is None): spec for spec in sizes.model.attention}
    for spec in kinds.values():
        for batch_size in (1, many):
            _attend(sizes, spec, batch_size)


def _attend(sizes: KernelSizes, spec: AttentionSpec, batch_size: int) -> None:
    """Attend as the backend of decodes does; those that are not named have kernels of their own."""
    index_B = sizes.ints(batch_size)
    backend = backend_names(sizes.attn)[-1]
    if backend in ("torch", "fi"):
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


def _linears(sizes: KernelSizes) -> None:
    """Multiply one token with weights of each shape, with a bias and without.

    The tile of a program is chosen by the shape. Gate and up projection of an MLP also have their
    activation.
    """
    width = sizes.model.width
    shapes = {*_split_by_outputs(sizes), *_split_by_inputs(sizes)}
    if sizes.mlp_width is not None:
        shapes.add((2 * sizes.mlp_width, width))
    for outputs, inputs in shapes:
        x_1I = sizes.numbers(1, inputs)
        for bias_O in (None, sizes.numbers(outputs)):
            gpu_linear(x_1I, sizes.weight(outputs, inputs), bias_O)
    if sizes.mlp_width is not None:
        gpu_linear_silu(sizes.numbers(1, width), sizes.weight(2 * sizes.mlp_width, width))


@dataclass(frozen=True, slots=True)
class _TiledProduct:
    """A weight of the model, as small tiles take it.

    Attributes:
        shape: outputs and inputs.
        halves: 2 for gate and up with their activation.
        may_divide: whether a norm adds up parts of the inputs.
        may_have_bias: as those of queries, keys and values may, which no config tells.
    """

    shape: tuple[int, int]
    halves: int = 1
    may_divide: bool = False
    may_have_bias: bool = False


def _tiled_products(sizes: KernelSizes) -> None:
    """Multiply some tokens by each small tile that a weight takes.

    A tile is chosen by the shape, and the product here is a smaller one.
    """
    like = sizes.numbers(1)
    calls = set()
    for product, num_tokens in itertools.product(_products_in_tiles(sizes), tiled_sizes()):
        outputs, inputs = product.shape
        tile = gpu_linear_tile(
            like,
            (num_tokens, outputs, inputs),
            halves=product.halves,
            may_divide=product.may_divide,
        )
        if tile is not None:
            calls |= {
                (tile, product.halves, _small(outputs), has_bias)
                for has_bias in {False, product.may_have_bias}
            }
    for tile, halves, outputs, has_bias in sorted(calls):
        _multiply_in_tiles(sizes, tile, halves, outputs, has_bias=has_bias)


def _products_in_tiles(sizes: KernelSizes) -> list[_TiledProduct]:
    model = sizes.model
    alone = sizes.info.size == 1
    qkv, *others = _split_by_outputs(sizes)
    output, *down = _split_by_inputs(sizes)
    products = [
        _TiledProduct(qkv, may_have_bias=True),
        *map(_TiledProduct, others),
        _TiledProduct(output, may_divide=alone, may_have_bias=model.attention_bias),
        *(_TiledProduct(each, 1, alone, model.mlp_bias) for each in down),
    ]
    if sizes.mlp_width is not None:
        gate_up = (2 * sizes.mlp_width, model.width)
        products.append(_TiledProduct(gate_up, halves=2))
        if model.mlp_bias:
            products.append(_TiledProduct(gate_up, may_have_bias=True))
    return products


def _multiply_in_tiles(
    sizes: KernelSizes, tile: LinearTile, halves: int, outputs: int, *, has_bias: bool
) -> None:
    kernels: Any = triton_kernels_for(sizes.numbers(1))
    x_1I = sizes.numbers(1, tile.parts * tile.inputs)
    weight_OI = sizes.numbers(halves * outputs, tile.parts * tile.inputs)
    if halves == 2:
        kernels.tiled_silu(x_1I, weight_OI, tile)
        return
    parts_XTO = kernels.tiled_linear(
        x_1I, weight_OI, sizes.numbers(outputs) if has_bias else None, tile
    )
    if tile.parts > 1:
        width = sizes.model.width
        parts_XTD = parts_XTO.new_zeros(tile.parts, 1, width)
        residual_TD = sizes.numbers(1, width)
        add_parts_rms_norm(parts_XTD, residual_TD, sizes.numbers(width), sizes.model.norm_eps)


def _split_by_outputs(sizes: KernelSizes) -> list[tuple[int, int]]:
    """Outputs and inputs of weights whose outputs the ranks divide, but gate and up.

    The first is that of queries, keys and values.
    """
    width = sizes.model.width
    num_all_heads = sizes.num_heads + 2 * sizes.num_kv_heads
    shapes = [(num_all_heads * sizes.model.head_dim, width), (len(sizes.vocab.tokens), width)]
    if sizes.model.num_experts:
        shapes.append((sizes.model.num_experts, width))  # the router, whole on each rank
    return shapes


def _split_by_inputs(sizes: KernelSizes) -> list[tuple[int, int]]:
    """Outputs and inputs of weights whose inputs the ranks divide.

    The first is that of attention's outputs.
    """
    width = sizes.model.width
    shapes = [(width, sizes.num_heads * sizes.model.head_dim)]
    if sizes.mlp_width is not None:
        shapes.append((width, sizes.mlp_width))
    return shapes


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
        mlp_width = shape.mlp_width if num_tokens == 1 else _small(shape.mlp_width)
        x_TD = sizes.numbers(num_tokens, _small(model.width))
        width = x_TD.shape[1]
        backend.forward(
            x_TD,
            sizes.numbers(num_experts, 2 * mlp_width, width),
            sizes.numbers(num_experts, width, mlp_width),
            sizes.numbers(num_tokens, each),
            sizes.ints(num_tokens, each),
        )


def _small(size: int) -> int:
    """A small size that Triton does not tell apart from this one."""
    if size % _ALIGNED == 0:
        return _ALIGNED
    return min(size, 2)


# Each is called on a thread, those first that take longest to compile.
_CALLS: tuple[Callable[[KernelSizes], None], ...] = (
    _experts,
    _attention,
    _sampling,
    _norms,
    _rotations,
    _linears,
    _tiled_products,
    _tables,
    _activations,
    _masks,
)
