"""The time of each kernel on the device at hand, beside its reference in torch.

    python benchmark/kernels.py [--tokens 1 256] [--context 1024] [--only choose] \\
        [--out results.jsonl]

Sizes are those of Qwen3-0.6B; experts, which it does not have, are those of Qwen3-30B-A3B. Calls
follow each other on the same random data, so small data stays in a cache. On a GPU the calls are
replayed from a CUDA graph, except for references that wait for the device. GB/s count the bytes
that have to be read or written once. A dash means: no kernel of this package here, or nothing to
count.
"""

# ruff: noqa: E731 - a table of calls
from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import kernel
from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.kernel import HeadNorms, Rotation, dispatch
from minisgl.moe import ExpertShape, create_moe_backend

# Sizes of the model, by the letters of minisgl.core.
D = 1024  # model width
MLP = 3072  # mlp width: F is torch's
N = 16  # query heads
K = 8  # kv heads
H = 128  # head width
V = 151936  # vocabulary
PAGE_SIZE = 64

# Sizes of the model with experts.
E = 128  # experts
A = 8  # experts that a token chooses
EXPERT_D = 2048  # model width
EXPERT_MLP = 768  # mlp width of an expert

SHORTEST = 140  # contexts of a step of the throughput workload
LONGEST = 1064
CALLS = 20
REPEAT = 7
MIN_CPU_S = 0.1  # of all calls together
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A call of a wrapper; its reference is the wrapper without kernels, or the one given."""

    name: str
    shape: str
    call: Call
    num_bytes: int | None = None
    reference: Call | None = None
    has_kernel: bool = True  # on this device
    reference_waits: bool = False  # for the device


class Data:
    """Random tensors on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_gpu = device == "cuda"
        self._random = torch.Generator(device).manual_seed(0)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self.device, dtype=torch.bfloat16)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=self._random, device=self.device, dtype=torch.int32
        )

    def shuffled(self, num: int) -> Tensor:
        return torch.randperm(num, generator=self._random, device=self.device)

    def pool(self, num_slots: int) -> Tensor:
        """Keys and values [2, P, Q, K, H], laid out as a layer of the device's KV cache."""
        num_pages = num_slots // PAGE_SIZE
        if self.on_gpu:
            return self.numbers(2, num_pages, PAGE_SIZE, K, H)
        return self.numbers(num_pages, 2, K, PAGE_SIZE, H).transpose(0, 1).transpose(2, 3)

    def page_table(self, num_rows: int, context: int) -> Tensor:
        num_pages = num_rows * (context // PAGE_SIZE)
        return self.shuffled(num_pages).int().view(num_rows, -1)


def cases(T: int, context: int, device: str) -> Iterator[Case]:
    """Yield one case after the other, each once its data is made."""
    data = Data(device)
    yield from rows(data, T)
    yield from heads(data, T, context)
    yield from tables(data, T, context)
    yield from sampling(data, T)
    yield from experts(data, T)


def rows(data: Data, T: int) -> Iterator[Case]:
    """Norms, activations, and products of few tokens."""
    x = data.numbers(T, D)
    residual = data.numbers(T, D)
    weight = data.numbers(D)
    norm = lambda: kernel.rms_norm(x, weight, 1e-6)
    yield Case("rms_norm", f"{T} x {D}", norm, 4 * T * D)
    add_norm = lambda: kernel.add_rms_norm(x, residual, weight, 1e-6)
    yield Case("add_rms_norm", f"{T} x {D}", add_norm, 8 * T * D)
    gate, up = data.numbers(T, 2 * MLP).chunk(2, dim=1)
    activate = lambda: kernel.silu_and_mul(gate, up)
    yield Case("silu_and_mul", f"{T} x {MLP}", activate, 6 * T * MLP)
    if not data.on_gpu or T > 16:
        return
    for inputs, outputs in ((D, 2 * N * H), (N * H, D), (D, 2 * MLP), (MLP, D), (D, V)):
        x = data.numbers(T, inputs)
        w = data.numbers(outputs, inputs)
        if outputs == 2 * MLP:
            gated = partial(kernel.gpu_linear_silu, x, w)
            yield Case("gpu_linear_silu", f"{T} x {inputs} to {MLP}", gated, 2 * inputs * outputs)
        linear = partial(kernel.gpu_linear, x, w, None)
        reference = partial(F.linear, x, w)
        shape = f"{T} x {inputs} to {outputs}"
        yield Case("gpu_linear", shape, linear, 2 * inputs * outputs, reference)


def heads(data: Data, T: int, context: int) -> Iterator[Case]:
    """Operations on the heads of a step: rotation, KV store and attention."""
    num_slots = T * context
    pool = data.pool(num_slots)
    last = torch.full((T,), context - 1, device=data.device, dtype=torch.int32)
    qkv = data.numbers(T, N + 2 * K, H)
    slot = data.shuffled(num_slots)[:T]
    rotation = Rotation(data.numbers(context, H), data.numbers(context, H), last)
    norms = HeadNorms(data.numbers(H), data.numbers(H), 1e-6)
    rotate = lambda: kernel.rotate_and_store(qkv, norms, rotation, slot, pool[0], pool[1])
    shape = f"{T} x {N + 2 * K} x {H}"
    yield Case("rotate_and_store", shape, rotate, 4 * T * H * (N + 2 * K))

    q = data.numbers(T, N, H)
    shape = f"{T} x {N}/{K} x {H} of {context}"
    yield from decodes(shape, q, pool, data.page_table(T, context), last)
    if data.on_gpu:
        longest = -(-LONGEST // PAGE_SIZE) * PAGE_SIZE
        mixed_last = data.ints(SHORTEST, LONGEST + 1, T) - 1
        mixed_pool = data.pool(T * longest)
        shape = f"{T} x {N}/{K} x {H} of {SHORTEST} to {LONGEST}"
        yield from decodes(shape, q, mixed_pool, data.page_table(T, longest), mixed_last)


def decodes(shape: str, q: Tensor, pool: Tensor, pages: Tensor, last: Tensor) -> Iterator[Case]:
    """Attention of each query to its context, up to the last position.

    `attend_decode` divides all contexts into as many splits, `BalancedDecode` into equal ranges, or
    has clusters.
    """
    row = torch.arange(len(q), device=q.device, dtype=torch.int32)
    o = torch.empty_like(q)
    k, v = pool
    scale = 1 / math.sqrt(H)
    num_bytes = 4 * K * H * int((last + 1).sum())
    attend = lambda: kernel.attend_decode(q, k, v, pages, row, row, last, o, scale=scale)
    yield Case("attend_decode", shape, attend, num_bytes, reference_waits=True)
    balanced = kernel.BalancedDecode.create_if_supported(pages, PAGE_SIZE, (N, K, H), q.dtype)
    if balanced is None:
        return
    for in_clusters in (False, True):
        if in_clusters and not balanced.can_use_clusters(len(q)):
            continue
        balanced.plan(row, last, in_clusters=in_clusters)
        options = {"in_clusters": in_clusters, "starts_early": True}
        planned = lambda options=options: balanced.attend(q, k, v, o, scale, **options)
        name = "BalancedDecode in clusters" if in_clusters else "BalancedDecode"
        yield Case(name, shape, planned, num_bytes, attend, reference_waits=True)


def tables(data: Data, T: int, context: int) -> Iterator[Case]:
    """Writes to the page table, and look-ups in it and in the token pool."""
    pages = data.page_table(T, context)
    token_pool = data.ints(0, V, T, context)
    row = torch.arange(T, device=data.device)
    last = torch.full_like(row, context - 1)
    row_32 = row.int()
    last_32 = last.int()
    look_up = lambda: kernel.look_up(row_32, last_32, token_pool, pages, PAGE_SIZE)

    def reference() -> tuple[Tensor, Tensor]:
        page = pages[row, last // PAGE_SIZE].long()
        return token_pool[row, last].long(), page * PAGE_SIZE + last % PAGE_SIZE

    shape = f"{T} of {T} x {context}"
    yield Case("look_up", shape, look_up, reference=reference, has_kernel=data.on_gpu)

    index = data.shuffled(pages.numel())[:T].int()
    value = data.ints(0, 99, T)
    scatter = lambda: kernel.scatter(pages, index, value)
    copy = lambda: pages.view(-1).index_copy_(0, index.long(), value)
    shape = f"{T} to {T} x {pages.shape[1]}"
    yield Case("scatter", shape, scatter, reference=copy, has_kernel=data.on_gpu)


def sampling(data: Data, T: int) -> Iterator[Case]:
    """From logits to tokens: noise, filters and grammar masks."""
    logits = data.numbers(T, V)
    seed = data.ints(0, 2**31 - 1, T, 2)
    position = torch.full((T,), 7, device=data.device, dtype=torch.int32)
    one = torch.ones(T, device=data.device)
    zero = torch.zeros(T, device=data.device)
    for name, temperature in (("greedy", zero), ("sampled", one)):
        choose = lambda heat=temperature: kernel.choose_tokens(logits, None, heat, seed, position)
        yield Case(
            "choose_tokens", f"{T} x {V}, {name}", choose, 2 * T * V,
            has_kernel=data.on_gpu, reference_waits=True,
        )  # fmt: skip

    can_count = kernel.cuda_kernels_for(logits) is not None
    for name, k, p in (("top_k 50", 50, 1.0), ("top_p 0.95", V, 0.95)):
        top_k = one.int() * k
        top_p = one * p
        lowest = lambda k=top_k, p=top_p: kernel.lowest_kept(logits, one, k, p, zero)
        yield Case(
            "lowest_kept", f"{T} x {V}, {name}", lowest, 2 * T * V,
            has_kernel=can_count, reference_waits=True,
        )  # fmt: skip

    words = data.ints(-(2**31), 2**31 - 1, T, -(-V // 32))
    host_words = words.cpu().pin_memory() if data.on_gpu else words
    row = torch.arange(T, device=data.device, dtype=torch.int32)
    mask = lambda: kernel.mask_logits(logits, row, host_words)
    bit = torch.arange(32, dtype=torch.int32, device=data.device)

    def fill() -> None:
        is_banned = (words[:, :, None] >> bit & 1 == 0).view(T, -1)[:, :V]
        logits.masked_fill_(is_banned, -torch.inf)

    yield Case("mask_logits", f"{T} x {V}", mask, reference=fill if data.on_gpu else None)


def experts(data: Data, T: int) -> Iterator[Case]:
    logits = data.numbers(T, E)
    x = data.numbers(T, EXPERT_D)
    gate_up = data.numbers(E, 2 * EXPERT_MLP, EXPERT_D)
    down = data.numbers(E, EXPERT_D, EXPERT_MLP)
    route = partial(kernel.route, logits, A, True)
    yield Case("route", f"{T} x {A} of {E}", route, has_kernel=data.on_gpu)
    weight, expert = route()
    num_bytes = 6 * EXPERT_MLP * EXPERT_D * len(expert.unique())
    sizes = ExpertShape(E, A, EXPERT_D, EXPERT_MLP, "bfloat16")
    backend = create_moe_backend(x.device, x.dtype, sizes)
    moe = lambda: backend.forward(x, gate_up, down, weight, expert)
    shape = f"{T} x {A} of {E} x {EXPERT_D} x {EXPERT_MLP}"
    reference = lambda: kernel.moe_reference(x, gate_up, down, weight, expert)
    yield Case("moe", shape, moe, num_bytes, reference, reference_waits=True)


def microseconds(call: Call, device: str, *, graph: bool) -> list[float]:
    """The time of a call, several times; on a GPU each is the mean of some calls in a row."""
    call()
    return microseconds_on_gpu(call, graph) if device == "cuda" else microseconds_on_cpu(call)


def microseconds_on_cpu(call: Call) -> list[float]:
    times = [time.perf_counter()]
    while len(times) <= REPEAT or (len(times) <= 50 * REPEAT and times[-1] - times[0] < MIN_CPU_S):
        call()
        times.append(time.perf_counter())
    return [1e6 * (after - before) for before, after in pairwise(times)]


def microseconds_on_gpu(call: Call, graph: bool) -> list[float]:
    call()
    torch.cuda.synchronize()

    def calls() -> None:
        for _ in range(CALLS):
            call()

    run = calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            calls()
        run = captured.replay

    values = []
    for _ in range(1 + REPEAT):  # the first warms up
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        values.append(start.elapsed_time(end) * 1e3 / CALLS)
    return values[1:]


def measure(case: Case, device: str) -> list[Figure]:
    """Print a row of the table for the kernel and its reference; return their figures."""
    loaders = ("load_cpu_kernels", "load_cuda_kernels", "_gpu_kernels")
    no_kernels: dict[str, Any] = dict.fromkeys(loaders, lambda *_: None)
    kernel_us = []
    if case.has_kernel:
        kernel_us = microseconds(case.call, device, graph=True)
    with patch.multiple(dispatch, **no_kernels):
        reference = case.reference or case.call
        torch_us = microseconds(reference, device, graph=not case.reference_waits)

    taken = "-"
    rate = "-"
    if kernel_us:
        taken = f"{median(kernel_us):.1f}"
        if case.num_bytes:
            rate = f"{case.num_bytes / median(kernel_us) / 1e3:.1f}"
    times = f"{taken:>12}{median(torch_us):12.1f}"
    print(f"{case.name:18}{case.shape:34}{times}{rate:>8}", flush=True)
    return [
        Figure(
            engine="minisgl",
            workload=f"{case.name} {case.shape}",
            model="qwen3-0.6b",
            device=device,
            metric=metric,
            values=values,
        )
        for metric, values in (("us", kernel_us), ("torch_us", torch_us))
        if values
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        help="in a step; default: 1 256 on a GPU, 1 16 on a CPU",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        help=f"in attention to equal lengths, a multiple of {PAGE_SIZE}",
    )
    parser.add_argument("--only", default="", help="kernels whose names have this in them")
    parser.add_argument("--out", type=output_file, help="append figures to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default_tokens = [1, 256] if device == "cuda" else [1, 16]
    figures = []
    print(f"{'kernel':18}{'shape':34}{'kernel µs':>12}{'torch µs':>12}{'GB/s':>8}")
    for num_tokens in args.tokens or default_tokens:
        for case in cases(num_tokens, args.context, device):
            if args.only in case.name:
                figures += measure(case, device)
    if args.out:
        append_figures(args.out, figures)


if __name__ == "__main__":
    main()
