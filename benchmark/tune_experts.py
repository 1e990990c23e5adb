"""Tunes the tiles of experts for the GPU at hand and writes them where the engine looks for them.

    python benchmark/tune_experts.py --model benchmark/models/qwen3-30b-a3b --tp 1 2 4 --ep 2 4

Each product (gate and up; down) is timed by itself for each number of tokens and each tile that
may be good for it, on random weights and random routing, replayed from a CUDA graph. Variants are
compiled before, in processes side by side. Then neighbouring numbers of tokens share tiles where
that costs at most --tolerance, because each variant is compiled at the first start of a machine.

A file is written after each number of tokens, so what is done when --seconds are over counts. The
numbers of tokens come in the order in which they matter: a number that is missing takes the tiles
of the next larger one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from minisgl.benchmark.arguments import duration, output_file, positive
from minisgl.benchmark.perf import provenance
from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo
from minisgl.kernel import ExpertTiles, ProductTile, gpu, moe_reference
from minisgl.moe import (
    ExpertShape,
    FusedMoeBackend,
    TiledSteps,
    TileTable,
    expert_shape,
    tuned_path,
    write_tuned_table,
)
from minisgl.moe.tiles import TUNED_FOLDER

TOKENS = (256, 16384, 64, 1024, 128, 4096, 16, 512, 8192, 32, 2048, 8)
BY_TOKEN = (1, 2, 4, 8)  # numbers of tokens that may not be worth sorting
ROUTINGS = 4  # so that a cache does not hold the weights of few experts
ONE_TILE_EACH = 1 << 20  # programs
SHARED_BYTES = 227 << 10  # of a processor
MIN_S = 1e-3  # of the calls in a graph
SMALL = (300, 16, 512, 256)  # to check a tile: tokens, experts, model width, mlp width
MOST_ERROR = 0.02  # of a tile's numbers in their dtype, relative to all
FINALISTS = 6  # tiles of a product that are timed again
DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there, only for tests

# Candidates by pairs: rows, bytes of a row, warps, stages.
Sizes = tuple[int, int, int, int]
FEW = [
    *((rows, row_bytes, 4, stages) for rows in (64, 128) for row_bytes in (128, 256)
      for stages in (3, 4, 5)),
    (32, 256, 4, 4),
    (32, 256, 4, 6),
    (32, 512, 4, 3),
    (32, 512, 4, 4),
    (64, 512, 4, 3),
    (64, 256, 8, 4),
    (128, 128, 8, 5),
    (128, 256, 8, 4),
    (256, 128, 8, 4),
]  # fmt: skip
CANDIDATES: dict[int, list[Sizes]] = {
    16: FEW,
    32: FEW,
    64: [
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 128, 4, 3),
        (128, 128, 4, 4),
        (128, 128, 4, 5),
        (128, 128, 8, 4),
        (128, 256, 4, 3),
        (256, 128, 4, 3),
        (256, 128, 8, 3),
        (256, 128, 8, 4),
    ],
    128: [
        (64, 128, 4, 4),
        (128, 128, 4, 3),
        (128, 128, 4, 4),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
        (128, 256, 8, 3),
        (256, 128, 8, 3),
        (256, 128, 8, 4),
        (256, 256, 8, 2),
    ],
    256: [(64, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 4)],
}
Times = dict[ProductTile, float]  # seconds
TimesByPairs = dict[int, tuple[Times, Times]]  # of gate and up, and of down


def pairs_for(num_tokens: int, shape: ExpertShape) -> list[int]:
    """Sizes of blocks that are neither filled many times nor nearly empty."""
    mean = num_tokens * shape.each / shape.num_routed
    return [p for p in CANDIDATES if min(mean / 2.5, 128) <= p <= max(16, 4 * mean)]


def tiles_for(pairs: int, num_processors: int) -> Iterator[ProductTile]:
    """Each candidate with as many programs as run at a time, and with one for each tile."""
    for rows, row_bytes, num_warps, num_stages in CANDIDATES[pairs]:
        buffers = num_stages - (pairs < 64)  # tensor cores read one out of registers there
        shared = buffers * (pairs + rows) * row_bytes + 2 * pairs * rows
        resident = max(1, min(SHARED_BYTES // shared, 16 // num_warps))
        for programs in (resident * num_processors, ONE_TILE_EACH):
            yield ProductTile(rows, row_bytes, num_warps, num_stages, programs)


def check_candidate(candidate: tuple[int, Sizes, int]) -> str | None:
    """Compile both products with a tile and compare them with the reference, on small sizes.

    Returns:
        the fault of the tile, if it has one.
    """
    pairs, sizes, each = candidate
    tile = ProductTile(*sizes, 2)
    random = torch.Generator().manual_seed(0)
    num_tokens, num_experts, width, mlp_width = SMALL
    score_TE = torch.rand(num_tokens, num_experts, generator=random)
    numbers = [
        torch.randn(num_tokens, width, generator=random),
        torch.randn(num_experts, 2 * mlp_width, width, generator=random) / width**0.5,
        torch.randn(num_experts, width, mlp_width, generator=random) / mlp_width**0.5,
        score_TE,
    ]
    try:
        x_TD, gate_up_EUD, down_EDF, score_TE = (x.to(DEVICE, DTYPE) for x in numbers)
        weight_TA, expert_TA = score_TE.topk(each)
        expected_TD = moe_reference(
            x_TD.float(), gate_up_EUD.float(), down_EDF.float(), weight_TA.float(), expert_TA
        )
        y_TD = torch.full_like(x_TD, torch.nan)
        tiles = ExpertTiles(pairs, tile, tile)
        gpu.moe_by_expert(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA, y_TD, tiles)
        part = float((y_TD.float() - expected_TD).norm() / expected_TD.norm())
    except Exception as error:  # a tile that does not fit is no candidate
        return f"{pairs} pairs, {sizes}: {error}"
    return None if part < MOST_ERROR else f"{pairs} pairs, {sizes}: wrong by {part}"


def compile_all(each: int, num_processes: int) -> None:
    """Compile all candidates in parallel; drop those that do not fit the device, or are wrong."""
    candidates = [(p, sizes, each) for p, listed in CANDIDATES.items() for sizes in listed]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        faults = list(pool.map(check_candidate, candidates))
    for (pairs, sizes, _), fault in zip(candidates, faults, strict=True):
        if fault:
            print(f"left out: {fault}", flush=True)
            CANDIDATES[pairs] = [other for other in CANDIDATES[pairs] if other != sizes]
    assert all(CANDIDATES.values()), "no tile fits this device"


def seconds_of(calls: Sequence[Callable[[], object]], repeat: int) -> float:
    """The time of a call on the device, by the median of replays of a graph with all calls."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(1 + repeat):  # the first warms up
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / len(calls))
    return median(times[1:])


class Layer:
    """Random experts of a shape, and random routings of steps."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._random = torch.Generator(DEVICE).manual_seed(0)
        num = shape.num_experts
        self.gate_up_EUD = self.numbers(num, 2 * shape.mlp_width, shape.width)
        self.down_EDF = self.numbers(num, shape.width, shape.mlp_width)

    def numbers(self, *size: int) -> Tensor:
        numbers = torch.empty(size, dtype=DTYPE, device=DEVICE)
        return numbers.normal_(std=size[-1] ** -0.5, generator=self._random)

    def routings(self, num_tokens: int) -> list[Tensor]:
        """Each int32 [T, A]; the experts of other ranks have numbers, but no weights."""
        shape = (num_tokens, self.shape.num_routed)
        routings = []
        for _ in range(ROUTINGS):
            score_TE = torch.rand(shape, generator=self._random, device=DEVICE)
            routings.append(score_TE.topk(self.shape.each).indices.int())
        return routings

    def time_products(
        self, num_tokens: int, pairs: int, num_processors: int
    ) -> tuple[Times, Times]:
        """The times of both products for all candidates whose blocks have `pairs` pairs."""
        shape = self.shape
        x_TD = self.numbers(num_tokens, shape.width)
        num_experts = shape.num_experts
        blocks = [gpu.sort_pairs(r, num_experts, pairs) for r in self.routings(num_tokens)]
        h_ZF = self.numbers(len(blocks[0].pair_Z), shape.mlp_width)
        h_out_ZF = torch.empty_like(h_ZF)
        y_JD = torch.empty(num_tokens * shape.each, shape.width, dtype=DTYPE, device=DEVICE)

        def gate_up(tile: ProductTile, b: gpu.PairBlocks) -> None:
            gpu.multiply_blocks(x_TD, self.gate_up_EUD, b, h_out_ZF, tile, each=shape.each)

        def down(tile: ProductTile, b: gpu.PairBlocks) -> None:
            gpu.multiply_blocks(h_ZF, self.down_EDF, b, y_JD, tile)

        gate_up_times, down_times = (
            self._time_product(product, blocks, list(tiles_for(pairs, num_processors)))
            for product in (gate_up, down)
        )
        return gate_up_times, down_times

    def _time_product(
        self,
        product: Callable[[ProductTile, gpu.PairBlocks], None],
        blocks: list[gpu.PairBlocks],
        tiles: list[ProductTile],
    ) -> Times:
        """Time all tiles once, then the best ones again."""
        times: Times = {}
        num_rounds = 1
        for tile in tiles:
            calls = [partial(product, tile, b) for b in blocks]
            if not times:  # calls of about a millisecond
                taken = seconds_of(calls, 1)
                num_rounds = max(1, min(8, int(MIN_S / (taken * len(calls)))))
            times[tile] = seconds_of(calls * num_rounds, 1)
        for tile in sorted(times, key=times.__getitem__)[:FINALISTS]:
            calls = [partial(product, tile, b) for b in blocks]
            times[tile] = seconds_of(calls * num_rounds, 5)
        return times

    def time_layer(self, num_tokens: int, table: TileTable | None) -> float:
        """Seconds of all kernels after the router; table None takes the tiles of the rule."""
        backend = FusedMoeBackend(table, self.shape.ep)
        x_TD = self.numbers(num_tokens, self.shape.width)
        weight_TA = self.numbers(num_tokens, self.shape.each)
        forward = partial(backend.forward, x_TD, self.gate_up_EUD, self.down_EDF, weight_TA)
        calls = [partial(forward, r) for r in self.routings(num_tokens)]
        return seconds_of(calls * (4 if num_tokens <= 512 else 1), 5)


def fastest(times: TimesByPairs) -> float:
    return min(min(gate_up.values()) + min(down.values()) for gate_up, down in times.values())


def seconds_with(tiles: ExpertTiles, times: TimesByPairs) -> float:
    """The time of both products; infinite if it was not measured."""
    gate_up, down = times.get(tiles.pairs, ({}, {}))
    never = float("inf")
    return gate_up.get(tiles.gate_up, never) + down.get(tiles.down, never)


def choose_steps(times: dict[int, TimesByPairs], tolerance: float) -> list[TiledSteps]:
    """The fewest tiles that for all numbers of tokens are within the tolerance of the fastest ones.

    Tiles are used up to the largest step for which they are within it. Among those that reach
    equally far, the fastest ones are used.
    """
    sizes = sorted(times)
    bounds = {size: (1 + tolerance) * fastest(times[size]) for size in sizes}
    steps: list[TiledSteps] = []
    first = 0
    while first < len(sizes):
        best: tuple[int, float, ExpertTiles] | None = None
        for tiles in good_tiles(times[sizes[first]], bounds[sizes[first]]):
            reached = list(
                itertools.takewhile(
                    lambda size: seconds_with(tiles, times[size]) <= bounds[size],  # noqa: B023
                    sizes[first:],
                )
            )
            excess = sum(seconds_with(tiles, times[size]) / bounds[size] for size in reached)
            rank = (len(reached), -excess / len(reached), tiles)
            if best is None or rank[:2] > best[:2]:
                best = rank
        assert best is not None
        first += best[0]
        steps.append(TiledSteps(sizes[first - 1], best[2]))
    return steps


def good_tiles(times: TimesByPairs, bound: float) -> Iterator[ExpertTiles]:
    for pairs, (gate_up, down) in times.items():
        for (tile, taken), (other, also) in itertools.product(gate_up.items(), down.items()):
            if taken + also <= bound:
                yield ExpertTiles(pairs, tile, other)


def most_by_token(layer: Layer, steps: list[TiledSteps]) -> int:
    """The largest number of tokens for which sorting them gains nothing."""
    always_sorted = TileTable(0, tuple(steps))
    never_sorted = TileTable(max(BY_TOKEN), (TiledSteps(max(BY_TOKEN) + 1, steps[0].tiles),))
    most = 1
    for num_tokens in BY_TOKEN[1:]:
        by_token = layer.time_layer(num_tokens, never_sorted)
        sorted_s = layer.time_layer(num_tokens, always_sorted)
        print(f"{num_tokens} tokens: by token {1e6 * by_token:.1f} µs, sorted {1e6 * sorted_s:.1f}")
        if sorted_s < by_token:
            break
        most = num_tokens
    return most


def tune(shape: ExpertShape, args: argparse.Namespace, deadline: float) -> None:
    """Write the file of a shape, and rewrite it as more numbers of tokens are timed."""
    device_name = torch.cuda.get_device_name()
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    path = args.out / tuned_path(device_name, shape).relative_to(TUNED_FOLDER)
    layer = Layer(shape)
    times: dict[int, TimesByPairs] = {}
    most = 0
    for num_tokens in args.tokens:
        if times and time.monotonic() > deadline:
            print(f"{shape.file_name}: no time from {num_tokens} tokens on", flush=True)
            break
        times[num_tokens] = {
            pairs: layer.time_products(num_tokens, pairs, num_processors)
            for pairs in pairs_for(num_tokens, shape)
        }
        report(shape, num_tokens, times[num_tokens], args.times)
        steps = choose_steps(times, args.tolerance)
        write(path, device_name, shape, steps, most)
    most = most_by_token(layer, steps)
    write(path, device_name, shape, steps, most)
    compare(layer, sorted({*times, *BY_TOKEN}), TileTable(most, above(most, steps)))


def above(most: int, steps: list[TiledSteps]) -> tuple[TiledSteps, ...]:
    kept = tuple(entry for entry in steps if entry.num_tokens > most)
    return kept or (TiledSteps(most + 1, steps[-1].tiles),)


def write(
    path: Path, device_name: str, shape: ExpertShape, steps: list[TiledSteps], most: int
) -> None:
    write_tuned_table(path, device_name, shape, above(most, steps), most, provenance())


def report(
    shape: ExpertShape, num_tokens: int, times: TimesByPairs, times_path: Path | None
) -> None:
    """Print the best of each size of block, with how much of the device it uses."""
    flops = 6 * num_tokens * shape.each / shape.ep * shape.width * shape.mlp_width
    hit = shape.num_experts * (1 - (1 - shape.each / shape.num_routed) ** num_tokens)
    num_bytes = 6 * hit * shape.width * shape.mlp_width
    for pairs, products in times.items():
        best = [min(product, key=product.__getitem__) for product in products]
        taken = sum(product[tile] for product, tile in zip(products, best, strict=True))
        print(
            f"{shape.file_name} {num_tokens:6} tokens, {pairs:3} pairs: {1e6 * taken:8.1f} µs, "
            f"{flops / taken / 1e12:5.0f} TFLOP/s, {num_bytes / taken / 1e12:4.2f} TB/s; "
            + "; ".join(f"{p[t] * 1e6:.1f} {t}" for p, t in zip(products, best, strict=True)),
            flush=True,
        )
        if times_path is None:
            continue
        with times_path.open("a") as file:
            for name, product in zip(("gate_up", "down"), products, strict=True):
                for tile, seconds in product.items():
                    sizes = [getattr(tile, field) for field in tile.__struct_fields__]
                    row = [shape.file_name, num_tokens, pairs, name, sizes, round(1e6 * seconds, 2)]
                    file.write(json.dumps(row) + "\n")


def compare(layer: Layer, sizes: list[int], table: TileTable) -> None:
    """Print the time of a layer with the rule's tiles and with the tuned ones."""
    for num_tokens in sizes:
        rule = layer.time_layer(num_tokens, None)
        tuned = layer.time_layer(num_tokens, table)
        print(
            f"{layer.shape.file_name} {num_tokens:6} tokens: rule {1e6 * rule:8.1f} µs, "
            f"tuned {1e6 * tuned:8.1f} µs, {rule / tuned:.3f} times as fast",
            flush=True,
        )


def shapes_of(
    folder: Path, by_width: Sequence[int], by_expert: Sequence[int] = ()
) -> list[ExpertShape]:
    """The shapes by the number of ranks, which divide the width of experts, or the experts."""
    model = ModelConfig.from_folder(folder)
    infos = [DistributedInfo(0, size) for size in by_width]
    infos += [DistributedInfo(0, size, ep=True) for size in by_expert]
    shapes = [expert_shape(model, info, DTYPE) for info in infos]
    assert all(shapes), f"{folder} has no experts"
    return [shape for shape in shapes if shape]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--tp", type=positive, nargs="+", help="numbers of ranks")
    parser.add_argument("--ep", type=positive, nargs="+", help="of ranks with whole experts")
    parser.add_argument("--tokens", type=positive, nargs="+", default=TOKENS, help="in a step")
    parser.add_argument("--seconds", type=duration, default=150, help="for all shapes together")
    parser.add_argument("--tolerance", type=float, default=0.015, help="of a step's time")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), help="that compile")
    parser.add_argument("--out", type=Path, default=TUNED_FOLDER, help="the folder of the files")
    parser.add_argument("--times", type=output_file, help="append every time to this file")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    began = time.monotonic()
    own_width = args.tp or ([] if args.ep else [1])
    shapes = shapes_of(args.model, own_width, args.ep or [])
    compile_all(shapes[0].each, args.processes)
    print(f"compiled after {time.monotonic() - began:.1f} s", flush=True)
    for i, shape in enumerate(shapes):
        now = time.monotonic()
        share = (began + args.seconds - now) / (len(shapes) - i)
        tune(shape, args, now + share)
        print(f"{shape.file_name} took {time.monotonic() - now:.1f} s", flush=True)


if __name__ == "__main__":
    main()
