"""Pages and rows by hand: one request at a time through the cache manager."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import Req, ReqSlice, SamplingParams
from minisgl.kvcache import create_prefix_cache, radix_cache
from minisgl.scheduler import CacheManager, TableManager, prefix_groups

# Dimensions: L positions of a sequence, P pages, R rows of the tables, X either of the former.
NUM_ROWS = 4
MAX_LENGTH = 40


@pytest.fixture
def few_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that share a prefix are a group."""
    for module in (radix_cache, prefix_groups):
        monkeypatch.setattr(module, "FEWEST_IN_GROUP", 2)


class Pages:
    """A cache manager of a few pages of 4 tokens, and the table that it writes to."""

    def __init__(self, num_pages: int, cache: str = "radix", page_size: int = 4) -> None:
        self._page_table_RP = np.full((NUM_ROWS, -(-MAX_LENGTH // page_size)), -1, dtype=np.int32)
        self._token_pool_RL = np.full((NUM_ROWS, MAX_LENGTH), -1, dtype=np.int32)
        self.table = TableManager(NUM_ROWS, self._page_table_RP.shape[1], MAX_LENGTH)
        self.manager = CacheManager(num_pages, create_prefix_cache(cache, page_size), self.table)
        self._num_made = 0
        self.num_written = 0

    def request(self, num_tokens: int, first_token: int = 0, salt: str | None = None) -> Req:
        self._num_made += 1
        prompt = np.arange(first_token, first_token + num_tokens, dtype=np.int32)
        params = SamplingParams(cache_salt=salt)
        return Req(self._num_made, prompt, params, MAX_LENGTH, seed=0)

    def admitted(self, num_tokens: int, first_token: int = 0, salt: str | None = None) -> Req:
        req = self.request(num_tokens, first_token, salt)
        assert self.manager.try_admit(req, reserve=0)
        return req

    def row(self, req: Req) -> list[int]:
        assert req.row is not None
        self._write()
        return [page for page in self._page_table_RP[req.row].tolist() if page >= 0]

    def tokens(self, req: Req) -> list[int]:
        self._write()
        return [token for token in self._token_pool_RL[req.row].tolist() if token >= 0]

    def _write(self) -> None:
        """As the device does with a plan's writes."""
        writes = self.table.drain_writes()
        self._page_table_RP.reshape(-1)[writes.page_index] = writes.pages
        self._token_pool_RL.reshape(-1)[writes.token_index] = writes.tokens
        self.num_written += len(writes.pages) + len(writes.tokens)
        for copy in writes.copies:
            for table_RX, length in (
                (self._page_table_RP, copy.num_tokens // self.manager.page_size),
                (self._token_pool_RL, copy.num_tokens),
            ):
                table_RX[copy.target, :length] = table_RX[copy.source, :length]

    def shared(self, reqs: list[Req]) -> int:
        """Leading tokens whose pages the rows have in common, by comparing them."""
        rows = [self.row(req) for req in reqs]
        equal = [len(set(pages)) == 1 for pages in zip(*rows, strict=False)]
        return [*equal, False].index(False) * self.manager.page_size

    def grouped(self, reqs: list[Req]) -> list[tuple[int, list[Req]]]:
        """The groups of their decodes: how many tokens each shares, and who is in it."""
        decodes = [ReqSlice(req, req.num_known - 1, req.num_known, samples=True) for req in reqs]
        groups = prefix_groups.group_by_prefix(decodes, self.manager.shared_prefixes(), 2**50)
        return [(group.num_tokens, [reqs[i] for i in group.members]) for group in groups]

    def end(self, req: Req) -> None:
        """Its tokens are all computed; take its pages back."""
        req.num_computed = req.num_tokens
        self.manager.release(req)


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "num_pages"),
    [(4, 0, 0), (4, 1, 1), (4, 4, 1), (4, 5, 2), (1, 7, 7), (16, 33, 3)],
)
def test_a_page_that_is_filled_in_part_counts_whole(
    page_size: int, num_tokens: int, num_pages: int
) -> None:
    assert Pages(8, page_size=page_size).manager._num_pages_for(num_tokens) == num_pages


def test_admission_gives_a_row_with_the_tokens_and_pages_for_all_of_them() -> None:
    pages = Pages(8)
    req = pages.admitted(9)

    assert len(pages.row(req)) == len(set(pages.row(req))) == 3
    assert pages.tokens(req) == list(range(9))
    assert (req.num_computed, pages.manager.num_available) == (0, 5)
    pages.manager.check_integrity([req])


@pytest.mark.parametrize("is_published", [False, True])
def test_nothing_is_kept_of_a_request_that_is_not_cacheable(is_published: bool) -> None:
    pages = Pages(16)
    first = pages.admitted(9)
    pages.manager.publish(first, 9)
    second = pages.admitted(9)
    longer = pages.admitted(17)
    if is_published:
        pages.manager.publish(longer, 17)
    for req in (first, second, longer):
        req.is_cacheable = False

    pages.end(longer)
    assert pages.manager.num_uncached(pages.request(17)) == 9  # the others have the rest
    pages.end(first)
    assert pages.manager.num_uncached(pages.request(17)) == 9
    pages.end(second)
    assert pages.manager.num_uncached(pages.request(17)) == 17
    assert pages.manager.num_available == 16
    pages.manager.check_integrity([])


def test_a_request_that_is_not_cacheable_leaves_what_other_prefixes_begin_with() -> None:
    pages = Pages(16)
    pages.end(pages.admitted(9))
    pages.end(pages.admitted(17))
    other = pages.request(17)
    other.tokens[12:17] = 99
    assert pages.manager.try_admit(other, reserve=0)
    other.is_cacheable = False
    pages.end(other)

    assert pages.manager.num_uncached(pages.request(17)) == 1
    pages.manager.check_integrity([])


@pytest.mark.parametrize(
    ("num_tokens", "reserve", "fits"),
    [(32, 0, True), (33, 0, False), (29, 1, False), (28, 1, True)],
)
def test_admission_counts_to_the_page(num_tokens: int, reserve: int, fits: bool) -> None:
    """At the edge of capacity neither one page is wasted nor one too many promised."""
    pages = Pages(8)

    assert pages.manager.try_admit(pages.request(num_tokens), reserve) is fits


def test_a_refused_admission_changes_nothing() -> None:
    pages = Pages(4)
    pages.end(pages.admitted(8))
    req = pages.request(20)

    assert not pages.manager.try_admit(req, reserve=0)
    assert (req.row, req.num_computed, pages.manager.num_available) == (
        None,
        0,
        4,
    )
    pages.manager.check_integrity([])
    pages.table.check_integrity([])


def test_a_cached_prefix_is_not_computed_but_the_last_token_always_is() -> None:
    pages = Pages(8)
    pages.end(pages.admitted(12))

    assert [pages.admitted(n).num_computed for n in (12, 13, 14, 3)] == [8, 12, 12, 0]


def test_a_prefix_that_the_request_itself_would_evict_is_not_counted_as_room() -> None:
    """Of 4 pages 2 hold its prefix: they are wanted, so 2 are left, not 4."""
    pages = Pages(4)
    pages.end(pages.admitted(8))

    assert not pages.manager.try_admit(pages.request(17), reserve=0)
    assert pages.manager.try_admit(pages.request(16), reserve=0)


def test_pages_for_tokens_that_are_cached_already_stay_in_their_row() -> None:
    pages = Pages(8)
    first = pages.admitted(9)
    second = pages.admitted(9)
    rows = (pages.row(first), pages.row(second))
    for req in (first, second):
        req.num_computed = 9
        pages.manager.publish(req, 9)
        pages.manager.check_integrity([first, second])

    assert (pages.row(first), pages.row(second)) == rows
    assert pages.manager.num_available == 2
    pages.manager.release(second)
    assert pages.manager.num_available == 5
    pages.manager.check_integrity([first])


def test_publishing_twice_takes_in_what_is_new() -> None:
    pages = Pages(8)
    req = pages.admitted(8)
    req.num_computed = 8
    pages.manager.publish(req, 8)
    pages.manager.publish(req, 8)
    req.num_tokens = 13
    assert pages.manager.try_extend(req)
    for token in range(8, 13):
        req.append(token)
    req.num_computed = 12
    pages.manager.publish(req, 12)
    pages.manager.check_integrity([req])

    assert pages.admitted(13).num_computed == 12


def test_what_is_not_computed_is_not_published() -> None:
    pages = Pages(8)
    req = pages.admitted(12)
    req.num_computed = 7
    pages.manager.release(req)

    assert pages.admitted(12).num_computed == 4


def test_a_row_only_grows() -> None:
    pages = Pages(8)
    req = pages.admitted(4)
    before = pages.row(req)
    req.num_tokens = 5
    assert pages.manager.try_extend(req)
    assert pages.manager.try_extend(req)

    assert pages.row(req)[: len(before)] == before
    assert len(pages.row(req)) == 2


def test_extending_evicts_but_never_takes_from_others() -> None:
    pages = Pages(4)
    pages.end(pages.admitted(8, first_token=100))
    req = pages.admitted(4)
    other = pages.admitted(4, first_token=50)
    req.num_tokens = 12
    assert pages.manager.try_extend(req)

    req.num_tokens = 13
    assert not pages.manager.try_extend(req)
    pages.manager.check_integrity([req, other])


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_all_pages_and_rows_come_back(cache: str) -> None:
    pages = Pages(16, cache)
    reqs = [pages.admitted(9, first) for first in (0, 0, 100, 200)]
    assert not pages.table.has_free
    for req in reqs:
        pages.end(req)

    assert pages.manager.num_available == 16
    assert [req.row for req in reqs] == [None] * 4
    pages.manager.check_integrity([])
    pages.table.check_integrity([])


def test_a_request_in_flight_is_not_released() -> None:
    pages = Pages(8)
    req = pages.admitted(4)
    req.num_in_flight = 1

    with pytest.raises(AssertionError):
        pages.manager.release(req)


def test_a_row_is_not_released_twice() -> None:
    pages = Pages(8)
    row = pages.table.allocate()
    pages.table.release(row)

    with pytest.raises(AssertionError):
        pages.table.release(row)


def test_the_integrity_check_sees_a_lost_and_a_doubled_page() -> None:
    """The check that all other tests rely on can fail."""
    lost = Pages(8)
    doubled = Pages(8)
    lost.manager._num_free -= 1
    req = doubled.admitted(4)
    doubled.manager._held[req.uid].own.append(0)

    for pages, reqs in ((lost, []), (doubled, [req])):
        with pytest.raises(AssertionError):
            pages.manager.check_integrity(reqs)


@pytest.mark.usefixtures("few_share")
def test_requests_with_a_cached_prefix_share_its_pages() -> None:
    pages = Pages(30)
    first = pages.admitted(10)
    assert pages.grouped([first]) == [], "one request has nothing in common"
    pages.manager.publish(first, 10)
    reqs = [first, pages.admitted(12)]
    assert pages.grouped(reqs) == [(8, reqs)]
    assert pages.shared(reqs) == 8
    reqs.append(pages.admitted(9, first_token=100))
    reqs.append(pages.admitted(6))
    assert pages.grouped(reqs) == [(8, reqs[:2])]
    assert pages.shared(reqs[:2] + reqs[3:]) == 4
    assert pages.grouped(reqs[1:]) == [(4, [reqs[1], reqs[3]])]
    pages.end(reqs.pop(1))
    assert pages.grouped(reqs) == [(4, [reqs[0], reqs[2]])]
    pages.end(reqs.pop())
    assert pages.grouped(reqs) == []


def test_a_row_whose_prefix_another_row_has_is_copied_and_not_sent() -> None:
    """All rows hold the same prefix, but only what is new of each is written from the host."""
    pages = Pages(30)
    pages.end(pages.admitted(24))
    pages.table.drain_writes()
    reqs = [pages.admitted(num_tokens) for num_tokens in (26, 30, 27)]

    assert [pages.tokens(req) for req in reqs] == [list(range(n)) for n in (26, 30, 27)]
    assert pages.shared(reqs) == 24
    assert [len(pages.row(req)) for req in reqs] == [7, 8, 7]
    prefix = 24 + 6
    assert pages.num_written == prefix + (2 + 1) + (6 + 2) + (3 + 1)
    pages.manager.check_integrity(reqs)


def test_a_copied_row_is_copied_in_turn() -> None:
    """The third has more in common with the second than that with the first."""
    pages = Pages(30)
    reqs = [pages.admitted(9)]
    pages.manager.publish(reqs[0], 9)
    reqs.append(pages.admitted(21))
    pages.manager.publish(reqs[1], 21)
    reqs.append(pages.admitted(23))

    assert [pages.tokens(req) for req in reqs] == [list(range(n)) for n in (9, 21, 23)]
    assert pages.row(reqs[2])[:5] == pages.row(reqs[1])[:5]
    assert pages.num_written == (9 + 3) + (13 + 4) + (3 + 1)


@pytest.mark.usefixtures("few_share")
def test_a_salt_keeps_prefixes_apart() -> None:
    pages = Pages(30)
    for salt in (None, "a"):
        pages.end(pages.admitted(12, salt=salt))
    reqs = [pages.admitted(12, salt=salt) for salt in (None, "a", "b")]

    assert [req.num_computed for req in reqs] == [8, 8, 0]
    assert not set(pages.row(reqs[0])) & set(pages.row(reqs[1]))
    assert pages.grouped(reqs) == []
    pages.manager.check_integrity(reqs)


def test_tokens_behind_those_of_a_row_are_written_with_the_next_plan() -> None:
    pages = Pages(8)
    req = pages.admitted(3)
    assert req.row is not None
    pages.table.write_tokens(req.row, 3, np.array([70, 71], dtype=np.int32))
    assert pages.tokens(req) == [0, 1, 2, 70, 71]

    pages.table.write_tokens(req.row, 5, np.array([72], dtype=np.int32))
    pages.table.write_tokens(req.row, 6, np.array([73], dtype=np.int32))
    assert pages.tokens(req)[5:] == [72, 73]


def test_what_was_written_for_a_row_that_came_back_is_not_written() -> None:
    pages = Pages(30)
    pages.end(pages.admitted(9))
    req = pages.admitted(6, first_token=50)
    writes = pages.table.drain_writes()
    assert len(set(writes.page_index.tolist())) == len(writes.page_index) == 2
    assert writes.tokens.tolist() == list(range(50, 56))
    assert len(pages.table.drain_writes().pages) == 0
    pages.manager.check_integrity([req])


def test_a_flush_drops_what_nobody_uses_and_keeps_the_rest() -> None:
    pages = Pages(10)
    for first_token, is_open in ((0, False), (100, True)):
        req = pages.admitted(12, first_token)
        pages.manager.publish(req, 12)
        if not is_open:
            pages.manager.release(req)
    assert pages.manager.flush() == 12
    assert pages.manager.flush() == 0
    pages.manager.check_integrity([req])
    assert pages.admitted(12, 0).num_computed == 0
    assert pages.admitted(13, 100).num_computed == 12
