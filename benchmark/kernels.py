"""What each own kernel takes on the device at hand, beside its reference in torch.

    python benchmark/kernels.py [--tokens 1 256] [--context 1024] [--only choose] [--out results.jsonl]

Sizes are those of Qwen3-0.6B; experts, which it has not, of Qwen3-30B-A3B. Calls follow each other on the same random
data, so that what is small stays in a cache. On a GPU they are replayed from a CUDA graph, but for references that wait
for the device. GB/s count what has to be read and written once. A dash: no own kernel here, or nothing to count.
"""

# ruff: noqa: E731 - a table of calls
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import kernel
from minisgl.benchmark.perf import Figure, append_figures, median_of
from minisgl.kernel import HeadNorms, Rotation, dispatch

# Dimension key: T tokens, D model width, F mlp width, N query heads, K kv heads, H head dim, V vocab, P page size,
# E experts of width X in a model of width W, A experts a token.
D, MLP, N, K, H, V, P = 1024, 3072, 16, 8, 128, 151936, 64
E, A, W, X = 128, 8, 2048, 768
SHORTEST, LONGEST = 140, 1064  # contexts of a step of the throughput workload
CALLS, REPEAT = 20, 7
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A call of a wrapper; its reference is the wrapper without kernels, unless another is given."""

    name: str
    shape: str
    call: Call
    num_bytes: int | None = None
    reference: Call | None = None
    is_own: bool = True  # there is a kernel on this device
    waits: bool = False  # the reference, for the device


def cases(T: int, context: int, device: str) -> Iterator[Case]:
    """One after the other, each as soon as its data is there."""
    on_gpu = device == "cuda"
    random = torch.Generator(device).manual_seed(0)
    numbers = lambda *shape: torch.randn(
        shape, generator=random, device=device, dtype=torch.bfloat16
    )
    ints = lambda low, high, *shape: torch.randint(
        low, high, shape, generator=random, device=device, dtype=torch.int32
    )  # fmt: skip

    x, residual, weight = numbers(T, D), numbers(T, D), numbers(D)
    yield Case("rms_norm", f"{T} x {D}", lambda: kernel.rms_norm(x, weight, 1e-6), 4 * T * D)
    yield Case(
        "add_rms_norm",
        f"{T} x {D}",
        lambda: kernel.add_rms_norm(x, residual, weight, 1e-6),
        8 * T * D,
    )
    gate, up = numbers(T, 2 * MLP).chunk(2, dim=1)
    yield Case("silu_and_mul", f"{T} x {MLP}", lambda: kernel.silu_and_mul(gate, up), 6 * T * MLP)
    for num_out in (2 * MLP, V) if on_gpu and T == 1 else ():
        w = numbers(num_out, D)
        linear, plain = (
            (lambda w=w: kernel.one_token_linear(x, w, None)),
            (lambda w=w: F.linear(x, w)),
        )
        yield Case("one_token_linear", f"{D} to {num_out}", linear, 2 * D * num_out, plain)

    num_slots, num_pages = T * context, context // P
    pool = numbers(2, num_slots, K, H) if on_gpu else numbers(2, K, num_slots, H).transpose(1, 2)
    shuffled = lambda n: torch.randperm(n, generator=random, device=device)
    pages, row = shuffled(T * num_pages).int().view(T, -1), torch.arange(T, device=device)
    qkv, slot, last = (
        numbers(T, N + 2 * K, H),
        shuffled(num_slots)[:T],
        torch.full_like(row, context - 1),
    )
    turns, norms = Rotation(*numbers(2, context, H), last), HeadNorms(*numbers(2, H), 1e-6)
    turn = lambda: kernel.rotate_and_store(qkv, norms, turns, slot, pool[0], pool[1])
    yield Case("rotate_and_store", f"{T} x {N + 2 * K} x {H}", turn, 4 * T * H * (N + 2 * K))
    q = numbers(T, N, H)
    yield from decodes(f"{T} x {N}/{K} x {H} of {context}", q, pool, pages, last)
    if on_gpu:
        most, lengths = -(-LONGEST // P), ints(SHORTEST, LONGEST + 1, T)
        mixed_pool, mixed_pages = (
            numbers(2, T * most * P, K, H),
            shuffled(T * most).int().view(T, -1),
        )
        shape = f"{T} x {N}/{K} x {H} of {SHORTEST} to {LONGEST}"
        yield from decodes(shape, q, mixed_pool, mixed_pages, lengths.long() - 1)

    ids, row_32, last_32 = ints(0, V, T, context), row.int(), last.int()
    look_up = lambda: kernel.look_up(row_32, last_32, ids, pages, P)
    slots = lambda: (ids[row, last].long(), pages[row, last // P].long() * P + last % P)
    yield Case("look_up", f"{T} of {T} x {context}", look_up, reference=slots, is_own=on_gpu)
    index, value = shuffled(T * num_pages)[:T].int(), ints(0, 99, T)
    copy = lambda: pages.view(-1).index_copy_(0, index.long(), value)
    scatter = lambda: kernel.scatter(pages, index, value)
    yield Case("scatter", f"{T} to {T} x {num_pages}", scatter, reference=copy, is_own=on_gpu)

    logits, words, seed = (
        numbers(T, V),
        ints(-(2**31), 2**31 - 1, T, -(-V // 32)),
        ints(0, 2**31 - 1, T, 2),
    )
    one, zero = torch.ones(T, device=device), torch.zeros(T, device=device)
    for name, heat in (("greedy", zero), ("sampled", one)):
        choose = lambda heat=heat: kernel.choose_tokens(logits, None, heat, seed, last_32)
        yield Case(
            "choose_tokens", f"{T} x {V}, {name}", choose, 2 * T * V, is_own=on_gpu, waits=True
        )
    counts = kernel.cuda_kernels_for(logits) is not None
    for name, k, p in (("top_k 50", 50, 1.0), ("top_p 0.95", V, 0.95)):
        filters = one, one.int() * k, one * p, zero
        lowest = lambda filters=filters: kernel.lowest_kept(logits, *filters)
        yield Case(
            "lowest_kept", f"{T} x {V}, {name}", lowest, 2 * T * V, is_own=counts, waits=True
        )
    bit = torch.arange(32, dtype=torch.int32, device=device)
    banned = lambda: (words[:, :, None] >> bit & 1 == 0).view(T, -1)[:, :V]
    ban = lambda: logits.masked_fill_(banned(), -torch.inf)
    read_by_gpu = words.cpu().pin_memory() if on_gpu else words
    mask = lambda: kernel.mask_logits(logits, row_32, read_by_gpu)
    yield Case("mask_logits", f"{T} x {V}", mask, reference=ban if on_gpu else None)

    scores, wide, experts = numbers(T, E), numbers(T, W), (numbers(E, 2 * X, W), numbers(E, W, X))
    yield Case("route", f"{T} x {A} of {E}", lambda: kernel.route(scores, A, True), is_own=on_gpu)
    routes = kernel.route(scores, A, True)
    read, mix = 6 * X * W * len(routes[1].unique()), lambda: kernel.moe(wide, *experts, *routes)
    yield Case("moe", f"{T} x {A} of {E} x {W} x {X}", mix, read, is_own=on_gpu, waits=True)


def decodes(shape: str, q: Tensor, pool: Tensor, pages: Tensor, last: Tensor) -> Iterator[Case]:
    """Attention of each query to its context, up to the last position; divided alike, and evenly over the device."""
    row, o = torch.arange(len(q), device=q.device), torch.empty_like(q)
    k, v = pool
    num_bytes = 4 * K * H * int((last + 1).sum())
    attend = lambda: kernel.attend_decode(q, k, v, pages, P, row, row, last, o)
    yield Case("attend_decode", shape, attend, num_bytes, waits=True)
    if own := kernel.BalancedDecode.create_if_supported(pages, P, (N, K, H), q.dtype):
        own.plan(row.int(), last.int())
        yield Case(
            "BalancedDecode", shape, lambda: own.attend(q, k, v, o), num_bytes, attend, waits=True
        )


def microseconds(call: Call, device: str, *, graph: bool) -> list[float]:
    """Of one call, several times; on a GPU each is the mean of some calls in a row."""
    call()
    if device == "cpu":
        began = [time.perf_counter()]
        while len(began) <= REPEAT or (len(began) <= 50 * REPEAT and began[-1] - began[0] < 0.1):
            call()
            began.append(time.perf_counter())
        return [1e6 * (after - before) for before, after in pairwise(began)]
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    if graph:
        with torch.cuda.graph(captured):
            for _ in range(CALLS):
                call()
    values = []
    for _ in range(1 + REPEAT):  # the first warms up
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if graph:
            captured.replay()
        else:
            for _ in range(CALLS):
                call()
        end.record()
        end.synchronize()
        values.append(start.elapsed_time(end) * 1e3 / CALLS)
    return values[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="in a step; default: 1 256 on a GPU, 1 16 on a CPU"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        help=f"in attention to equal lengths, a multiple of {P}",
    )
    parser.add_argument("--only", default="", help="kernels whose names have this in them")
    parser.add_argument("--out", type=Path, help="append figures to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    no_kernels = dict.fromkeys(
        ("load_cpu_kernels", "load_cuda_kernels", "_gpu_kernels"), lambda *_: None
    )
    figures = []
    print(f"{'kernel':18}{'shape':34}{'kernel µs':>12}{'torch µs':>12}{'GB/s':>8}")
    for num_tokens in args.tokens or ([1, 256] if device == "cuda" else [1, 16]):
        for case in cases(num_tokens, args.context, device):
            if args.only not in case.name:
                continue
            own = microseconds(case.call, device, graph=True) if case.is_own else []
            with patch.multiple(dispatch, **no_kernels):
                plain = microseconds(case.reference or case.call, device, graph=not case.waits)
            taken = f"{median_of(own):.1f}" if own else "-"
            rate = f"{case.num_bytes / median_of(own) / 1e3:.1f}" if own and case.num_bytes else "-"
            print(
                f"{case.name:18}{case.shape:34}{taken:>12}{median_of(plain):12.1f}{rate:>8}",
                flush=True,
            )
            about: Any = {
                "workload": f"{case.name} {case.shape}",
                "model": "qwen3-0.6b",
                "device": device,
            }
            for metric, values in (("us", own), ("torch_us", plain)):
                if args.out and values:
                    figures.append(Figure(engine="minisgl", metric=metric, values=values, **about))
    if args.out:
        append_figures(args.out, figures)


if __name__ == "__main__":
    main()
