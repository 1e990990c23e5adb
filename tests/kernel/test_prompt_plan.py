"""The plan of csrc/hopper/plan.cu, built for a CPU: which processor takes which keys of which tile.

The oracle is what FlashInfer's kernel does with an item of a plan, and how long the plan's own cost
says that it takes.
"""

# Dimensions: B prompts of a step, T queries of a tile.

from __future__ import annotations

import ctypes
import math
import subprocess
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minisgl.attention.flashinfer.plans import running_sum
from minisgl.attention.flashinfer.prompts import _PLAN_BYTES, PromptParts
from minisgl.kernel import native

STAND_IN = Path(__file__).with_name("plan_on_cpu")
SOURCES = Path(native.__file__).with_name("csrc") / "hopper"
OPTIONS = [
    "-std=c++17",
    "-O1",
    "-D_GLIBCXX_ASSERTIONS",
    "-fsanitize=undefined",
    "-fno-sanitize=vptr",
    "-fsanitize-undefined-trap-on-error",
    "-fPIC",
    "-shared",
]
WIDTHS = [64, 128, 256]  # of heads
LITTER = -77
GUARD = 1000  # numbers after the memory of a plan
H200 = 132  # processors


class Item(NamedTuple):
    """What a processor takes. The first members are those of `Work`, in their order."""

    head: int
    tile: int
    first_query: int
    first_page: int
    num_queries: int
    num_keys: int
    part: int


class Part(NamedTuple):
    """As in sizes.h."""

    first: int
    num: int
    num_queries: int
    unused: int


class Tile(NamedTuple):
    """A tile of queries of a head of a prompt."""

    prompt: int
    tile: int
    head: int


@dataclass(frozen=True)
class Step:
    """The prompts of a step: each (start, end) of the positions that are computed."""

    spans: list[tuple[int, int]]
    num_heads: int = 1
    page_size: int = 64
    num_decodes: int = 0  # tokens before the prompts
    window: int | None = None  # keys that a query sees, its own included
    has_pages: bool = True

    def __str__(self) -> str:
        return f"{self.num_heads} heads of {self.spans} in pages of {self.page_size}"

    @property
    def window_left(self) -> int:
        return -1 if self.window is None else self.window - 1

    @property
    def length_B(self) -> np.ndarray:
        return np.array([end - start for start, end in self.spans], dtype=np.int32)

    @property
    def end_B(self) -> np.ndarray:
        return np.array([end for _, end in self.spans], dtype=np.int32)

    @property
    def qo_indptr(self) -> np.ndarray:
        return running_sum(self.length_B).numpy() + np.int32(self.num_decodes)

    @property
    def kv_indptr(self) -> np.ndarray:
        return running_sum(-(-self.end_B // self.page_size)).numpy()


@dataclass(frozen=True)
class Plan:
    """A plan as the kernel reads it.

    Attributes:
        items: of each processor, in turn.
        places: where the members of `Work` begin.
        numbers: int32, all of it.
    """

    step: Step
    width: Width
    items: list[list[Item]]
    parts: dict[int, Part]
    places: list[int]
    numbers: np.ndarray

    @property
    def all_items(self) -> list[Item]:
        return [item for items in self.items for item in items]

    def prompt_of(self, item: Item) -> int:
        query = item.first_query + item.tile * self.width.tile
        return int(np.searchsorted(self.step.qo_indptr, query, side="right")) - 1

    def tile_of(self, item: Item) -> Tile:
        prompt = self.prompt_of(item)
        query = item.first_query + item.tile * self.width.tile - self.step.qo_indptr[prompt]
        assert query % self.width.tile == 0
        return Tile(prompt, query // self.width.tile, item.head)

    def keys_of(self, item: Item) -> tuple[int, np.ndarray]:
        """The first key, and of each query the end of what the kernel's mask shows of the keys.

        The kernel takes all queries of a part, and those of a whole tile that are in its prompt.
        """
        query_T = item.tile * self.width.tile + np.arange(self.width.tile)
        if item.part < 0:
            query_T = query_T[query_T < item.num_queries]
        else:
            query_T = query_T[: self.parts[item.part].num_queries]
        seen_T = np.minimum(item.num_keys, query_T + 1 + item.num_keys - item.num_queries)
        first_page = item.first_page - self.step.kv_indptr[self.prompt_of(item)]
        begin = int(first_page) * self.step.page_size
        return begin, begin + seen_T

    def time_of(self, item: Item) -> int:
        """In keys, as plan.cu says."""
        begin, end_T = self.keys_of(item)
        last = item.num_keys - item.num_queries + (item.tile + 1) * self.width.tile
        assert end_T[-1] - begin <= min(item.num_keys, last)
        num_keys = min(item.num_keys, last) - self.first_key_of(item)
        return num_keys + self.width.keys_to_begin_and_end

    def first_key_of(self, item: Item) -> int:
        """Of those that the kernel reads: it begins a tile before the window of the first query."""
        if self.step.window is None:
            return 0
        assert item.part < 0, "its queries are not where their windows would be"
        query = item.num_keys - item.num_queries + item.tile * self.width.tile
        return first_key_read(self.width, self.step, query)

    @property
    def loads(self) -> list[int]:
        return [sum(map(self.time_of, items)) for items in self.items]

    @property
    def end(self) -> int:
        return max(self.loads) + (self.width.keys_to_join if self.parts else 0)


def first_key_read(width: Width, step: Step, query: int) -> int:
    """By the kernel, of a tile that begins with the query at this position."""
    assert step.window is not None
    tile_keys = width.tile_keys(has_pages=step.has_pages)
    first_seen = query + 1 - step.window
    return max(0, (first_seen // tile_keys - 1) * tile_keys)


class Width:
    """make_plan for heads of one width.

    Attributes:
        tile: queries of one.
        keys_to_begin_and_end, keys_to_join: the costs of plan.cu.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.plan.restype = ctypes.c_bool
        self.tile = self._constant("tile_queries")
        self.keys_to_begin_and_end = self._constant("keys_to_begin_and_end")
        self.keys_to_join = self._constant("keys_to_join")

    def tile_keys(self, *, has_pages: bool) -> int:
        return self._constant("paged_tile_keys" if has_pages else "ragged_tile_keys")

    def _constant(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def first_key(self, step: Step, query: int) -> int:
        sizes = map(ctypes.c_int64, (query, step.window_left))
        first: int = self._library.first_key(*sizes, ctypes.c_bool(step.has_pages))
        return first

    def plan(
        self,
        step: Step,
        num_processors: int,
        max_parts: int,
        *,
        graph_tokens: int | None = None,
        num_bytes: int = 1 << 20,
        litter: int = LITTER,
    ) -> Plan | None:
        """Plan, and check that nothing is written beyond the memory. None if there is no room."""
        numbers = np.full(num_bytes // 4 + GUARD, litter, dtype=np.int32)
        pinned = numbers.copy()
        places = np.zeros(9, dtype=np.int64)
        arrays = [step.qo_indptr, step.kv_indptr, step.end_B]
        num_tokens = int(step.length_B.sum()) if graph_tokens is None else graph_tokens
        sizes = [num_tokens, len(step.spans), step.num_heads, step.page_size]
        has_room = self._library.plan(
            ctypes.c_int(num_processors),
            *(ctypes.c_void_p(x.ctypes.data) for x in (numbers, pinned)),
            ctypes.c_size_t(num_bytes),
            *(ctypes.c_void_p(x.ctypes.data) for x in arrays),
            *map(ctypes.c_int64, [*sizes, step.window_left]),
            ctypes.c_bool(step.has_pages),
            ctypes.c_bool(graph_tokens is not None),
            ctypes.c_int(max_parts),
            ctypes.c_void_p(places.ctypes.data),
        )
        for x in (numbers, pinned):
            assert (x[num_bytes // 4 :] == litter).all()
        if not has_room:
            assert (pinned == litter).all()
            return None
        return self._read(step, num_processors, numbers, places.tolist())

    def _read(
        self, step: Step, num_processors: int, numbers: np.ndarray, places: list[int]
    ) -> Plan:
        indptr_at, *column_at, parts_at = places
        indptr = numbers[indptr_at:][: num_processors + 1].tolist()
        columns = [numbers[at:][: indptr[-1]].tolist() for at in column_at]
        items = list(map(Item, *columns))
        parts = {
            item.part: Part(*numbers[parts_at + 4 * item.part :][:4].tolist())
            for item in items
            if item.part >= 0
        }
        of_processor = [items[begin:end] for begin, end in pairwise(indptr)]
        return Plan(step, self, of_processor, parts, places, numbers)


@pytest.fixture(scope="module")
def widths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Width]:
    """make_plan for each width of heads."""
    folder = tmp_path_factory.mktemp("plan")
    includes = [f"-I{STAND_IN}", f"-I{SOURCES}"]
    libraries = {width: folder / f"plan{width}.so" for width in WIDTHS}
    compilers = []
    for width, library in libraries.items():
        command = ["c++", *OPTIONS, f"-DPROMPT_HEAD_DIM={width}", *includes]
        command += [str(STAND_IN / "plan.cpp"), "-o", str(library)]
        compilers.append(subprocess.Popen(command))
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    return {width: Width(library) for width, library in libraries.items()}


starts = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 131_072))
windows = st.one_of(st.integers(1, 300), st.sampled_from([512, 1024, 4096]))
lengths = st.one_of(st.integers(0, 3), st.integers(0, 900), st.sampled_from([127, 128, 129, 192]))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    spans = draw(st.lists(st.tuples(starts, lengths), min_size=1, max_size=6))
    return Step(
        [(start, start + length) for start, length in spans],
        num_heads=draw(st.sampled_from([1, 2, 5, 8, 40])),
        page_size=draw(st.sampled_from([1, 16, 48, 64, 256])),
        num_decodes=draw(st.sampled_from([0, 7])),
        window=draw(st.none() | windows),
        has_pages=draw(st.booleans()),
    )


any_width = st.sampled_from(WIDTHS)
any_processors = st.sampled_from([1, 2, 3, 7, 78, H200])


def most_parts(num_processors: int) -> int:
    """A processor begins at most one tile that it does not end, and ends one that others began."""
    return 2 * (num_processors - 1)


def planned(width: Width, step: Step, num_processors: int, max_parts: int | None = None) -> Plan:
    """A plan for which there is room, with all parts that it may want."""
    parts = most_parts(num_processors) if max_parts is None else max_parts
    plan = width.plan(step, num_processors, parts)
    assert plan is not None
    return plan


def expected_tiles(width: Width, step: Step) -> set[Tile]:
    return {
        Tile(prompt, tile, head)
        for prompt, length in enumerate(step.length_B.tolist())
        for tile in range(-(-length // width.tile))
        for head in range(step.num_heads)
    }


# Steps of which some tiles are cut, on so many processors.
CUT = [
    (Step([(7872, 8000)], num_heads=2), 3),
    (Step([(11_552, 12_000)], num_heads=48), H200),
    (Step([(11_168, 12_000)], num_heads=40, page_size=16), H200),
    (Step([(7000, 7130), (4000, 4500), (9000, 9129), (12, 40)], num_heads=8), H200),
    (Step([(131_000, 131_072)], num_heads=1, page_size=1), H200),
    (Step([(131_000, 131_072), (0, 3000)], num_heads=64, page_size=256), H200),
    # Those of few heads, as ranks have them.
    (Step([(23_726, 23_821)], num_heads=4), H200),
    (Step([(12_661, 12_748), (2949, 3276)], num_heads=8), H200),
    (Step([(2136, 2568), (20_205, 20_263), (2090, 2884), (1446, 1551)], num_heads=4), H200),
]
cut_steps = pytest.mark.parametrize(("step", "num_processors"), CUT, ids=str)
every_width = pytest.mark.parametrize("width", WIDTHS)


def check_keys(plan: Plan) -> None:
    """Each query of each tile sees each key up to its own once, and the parts are its tile's."""
    of_tile: dict[Tile, list[Item]] = defaultdict(list)
    for item in plan.all_items:
        of_tile[plan.tile_of(item)].append(item)
    assert set(of_tile) == expected_tiles(plan.width, plan.step)
    for tile, items in of_tile.items():
        start, end = plan.step.spans[tile.prompt]
        first = tile.tile * plan.width.tile
        num_queries = min(plan.width.tile, end - start - first)
        seen_T = np.zeros(num_queries, dtype=np.int64)
        for begin, end_T in sorted(map(plan.keys_of, items), key=lambda keys: keys[0]):
            assert len(end_T) == num_queries
            assert (seen_T == begin).all(), "keys are missing, or there twice"
            assert (end_T > begin).all(), "a query sees no key of a part"
            seen_T = end_T
        assert (seen_T == start + first + np.arange(num_queries) + 1).all()
        check_parts(plan, [item.part for item in items], num_queries)


def check_parts(plan: Plan, parts: list[int], num_queries: int) -> None:
    """The parts of a tile follow one another, and each says so."""
    if len(parts) == 1:
        assert parts == [-1]
        return
    assert sorted(parts) == list(range(min(parts), min(parts) + len(parts)))
    for part in parts:
        assert plan.parts[part] == (min(parts), len(parts), num_queries, 0)


def check_pages(plan: Plan) -> None:
    """The kernel reads the pages of an item's keys, and its pages are its prompt's."""
    for item in plan.all_items:
        prompt = plan.prompt_of(item)
        first_page, end_page = plan.step.kv_indptr[prompt : prompt + 2]
        assert first_page <= item.first_page
        assert item.first_page + -(-item.num_keys // plan.step.page_size) <= end_page


def check_memory(plan: Plan, num_parts: int) -> None:
    """Nothing lies where something else does, and the parts lie as they are loaded."""
    indptr_at, *column_at, parts_at = plan.places
    taken = np.zeros(len(plan.numbers), dtype=np.int64)
    num_items = len(plan.all_items)
    kv_indptr = plan.step.kv_indptr
    taken[: len(kv_indptr)] += 1
    assert (plan.numbers[: len(kv_indptr)] == kv_indptr).all()
    taken[indptr_at : indptr_at + len(plan.items) + 1] += 1
    taken[parts_at : parts_at + 4 * num_parts] += 1
    for at in column_at:
        taken[at : at + num_items] += 1
    assert taken.max() <= 1
    assert parts_at % 4 == 0
    used = [item.part for item in plan.all_items if item.part >= 0]
    assert sorted(used) == list(range(len(used)))
    assert len(used) <= num_parts


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors)
def test_each_key_counts_once(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    plan = planned(widths[width], step, num_processors)
    check_keys(plan)
    check_pages(plan)
    check_memory(plan, most_parts(num_processors))


@every_width
@cut_steps
def test_tiles_are_cut_where_that_ends_sooner(
    widths: dict[int, Width], step: Step, num_processors: int, width: int
) -> None:
    plan = planned(widths[width], step, num_processors)
    assert plan.parts
    assert plan.end < planned(widths[width], step, num_processors, max_parts=0).end
    check_keys(plan)
    check_pages(plan)
    check_memory(plan, most_parts(num_processors))
    assert max(plan.loads) <= 1.25 * sum(plan.loads) / num_processors


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors)
def test_a_plan_ends_no_later_than_one_of_whole_tiles(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    whole = planned(widths[width], step, num_processors, max_parts=0)
    plan = planned(widths[width], step, num_processors)
    assert not whole.parts
    assert plan.end <= whole.end


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors)
def test_whole_tiles_of_a_head_stay_together(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    """A tile goes where it begins first; those of a head go before those of the next."""
    plan = planned(widths[width], step, num_processors, max_parts=0)
    check_keys(plan)
    loads = plan.loads
    for items, load in zip(plan.items, loads, strict=True):
        heads = [item.head for item in items]
        assert heads == sorted(heads)
        if items:
            assert load - plan.time_of(items[-1]) <= min(loads)


# Of heads whose tiles would be planned as if they read all keys: those of long contexts.
WINDOWED = [
    Step([(0, 8192)], num_heads=14, window=1024, has_pages=False),
    Step([(16_000, 17_000), *[(0, 100)] * 64], num_heads=16, window=1024),
]


@every_width
@pytest.mark.parametrize("step", WINDOWED, ids=["long", "mixed"])
def test_processors_end_together_with_a_window(
    widths: dict[int, Width], step: Step, width: int
) -> None:
    plan = planned(widths[width], step, H200)
    longest = max(map(plan.time_of, plan.all_items))
    assert plan.end <= sum(plan.loads) / H200 + longest


@every_width
@pytest.mark.parametrize("has_pages", [False, True])
@pytest.mark.parametrize("window", [1, 128, 1024])
def test_the_cost_begins_with_the_first_key_that_is_read(
    widths: dict[int, Width], window: int, has_pages: bool, width: int
) -> None:
    step = Step([], window=window, has_pages=has_pages)
    for query in range(2000):
        expected = first_key_read(widths[width], step, query)
        assert widths[width].first_key(step, query) == expected


@settings(max_examples=80, deadline=None)
@given(steps(), windows, any_width, any_processors)
def test_the_kernel_reads_each_key_within_a_window(
    widths: dict[int, Width], step: Step, window: int, width: int, num_processors: int
) -> None:
    plan = planned(widths[width], replace(step, window=window), num_processors)
    for item in plan.all_items:
        _, end_T = plan.keys_of(item)
        assert plan.first_key_of(item) <= max(0, end_T[0] - window)


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors)
def test_tiles_stay_whole_with_a_window(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    assume(step.window is not None)
    assert not planned(widths[width], step, num_processors).parts


@every_width
@cut_steps
def test_tiles_that_are_cut_stay_whole_with_a_window(
    widths: dict[int, Width], step: Step, num_processors: int, width: int
) -> None:
    plan = planned(widths[width], replace(step, window=1 << 20), num_processors)
    assert not plan.parts
    check_keys(plan)


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors)
def test_a_window_that_hides_no_key_changes_nothing(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    longest = int(step.end_B.max())
    without, *with_window = (
        planned(widths[width], replace(step, window=window), num_processors, max_parts=0)
        for window in (None, max(1, longest), 1 << 30)
    )
    for plan in with_window:
        assert plan.places == without.places
        assert np.array_equal(plan.numbers, without.numbers)


@settings(max_examples=80, deadline=None)
@given(steps(), any_width, any_processors, st.integers(0, 12))
def test_tiles_stay_whole_where_parts_have_no_room(
    widths: dict[int, Width], step: Step, width: int, num_processors: int, max_parts: int
) -> None:
    plan = planned(widths[width], step, num_processors, max_parts)
    check_keys(plan)
    check_memory(plan, max_parts)


@every_width
@cut_steps
def test_all_parts_or_none(
    widths: dict[int, Width], step: Step, num_processors: int, width: int
) -> None:
    num_parts = len(planned(widths[width], step, num_processors).parts)
    assert planned(widths[width], step, num_processors, num_parts).parts
    assert not planned(widths[width], step, num_processors, num_parts - 1).parts


@settings(max_examples=150, deadline=None)
@given(steps(), any_width, any_processors, st.integers(0, 200))
def test_plans_of_a_graph_lie_alike(
    widths: dict[int, Width], step: Step, width: int, num_processors: int, padding: int
) -> None:
    """A graph reads each plan where the one lay with which it was captured."""
    tokens = int(step.length_B.sum()) + padding
    parts = most_parts(num_processors)
    captured = Step(
        [(0, 0)] * (len(step.spans) - 1) + [(0, tokens)], step.num_heads, step.page_size
    )
    plan = widths[width].plan(step, num_processors, parts, graph_tokens=tokens)
    first = widths[width].plan(captured, num_processors, parts, graph_tokens=tokens)
    assert plan is not None
    assert first is not None
    assert plan.places == first.places
    check_keys(plan)
    check_memory(plan, parts)


@settings(max_examples=30, deadline=None)
@given(steps(), any_width, any_processors)
def test_a_plan_depends_on_its_step_alone(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    plan = planned(widths[width], step, num_processors)
    again = widths[width].plan(step, num_processors, most_parts(num_processors), litter=99)
    assert again is not None
    assert plan.items == again.items
    assert plan.parts == again.parts


@settings(max_examples=30, deadline=None)
@given(steps(), any_width, any_processors)
def test_a_plan_takes_its_memory_or_none(
    widths: dict[int, Width], step: Step, width: int, num_processors: int
) -> None:
    plan = planned(widths[width], step, num_processors)
    assume(plan.all_items)
    parts = most_parts(num_processors)
    *_, before_last, last_column, _ = plan.places
    num_bytes = 4 * (last_column + (last_column - before_last))
    assert widths[width].plan(step, num_processors, parts, num_bytes=num_bytes) is not None
    assert widths[width].plan(step, num_processors, parts, num_bytes=num_bytes - 4) is None


@every_width
def test_512_prompts_fit(widths: dict[int, Width], width: int) -> None:
    for spans in ([(0, 16)] * 512, [(0, 0)] * 511 + [(100_000, 108_192)], [(5000, 5016)] * 512):
        step = Step(spans, num_heads=64)
        plan = widths[width].plan(step, H200, most_parts(H200), num_bytes=_PLAN_BYTES)
        assert plan is not None
        assert len(plan.all_items) >= 64 * math.ceil(8192 / widths[width].tile)


@every_width
def test_parts_have_room(
    widths: dict[int, Width], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `HopperPaged` allocates is enough for tiles of this width, and for every plan."""
    processors = SimpleNamespace(multi_processor_count=H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    outputs, logs, num_done = PromptParts.on(torch.device("cpu"), width)
    assert len(num_done) >= most_parts(H200)
    assert len(logs) >= len(num_done) * widths[width].tile
    assert len(outputs) >= len(num_done) * widths[width].tile * width
