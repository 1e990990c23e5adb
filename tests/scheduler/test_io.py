"""Ranks stay in step: the leader's link gives its followers equal inputs, over real queues."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from minisgl.config import SchedulerConfig
from minisgl.core import NO_WRITES, BatchPlan, Grammar, RowCopy, SamplingParams
from minisgl.errors import EngineFailed
from minisgl.message import (
    AbortMsg,
    BatchDetokenizeMsg,
    BatchSchedulerMsg,
    DetokenizeMsg,
    EngineStats,
    ExitMsg,
    GrammarCompiledMsg,
    LeaderMsg,
    SchedulerMsg,
    ShutdownMsg,
    UserMsg,
    decoder,
    encode,
    pack_ids,
)
from minisgl.processes.addresses import DETOKENIZER, Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler import (
    FollowerLink,
    LeaderLink,
    Scheduler,
    ZmqInbox,
    ZmqOutbox,
)
from minisgl.scheduler.decode import RunningPlan
from minisgl.scheduler.grammars.budget import GrammarBudget
from minisgl.scheduler.step_digest import StepDigests
from tests.scheduler.fake_executor import FakeExecutor
from tests.scheduler.harness import VOCAB_SIZE, AnswerBook, Host, exactly, make_limits

NUM_FOLLOWERS = 2
GROWN = Grammar("regex", "(a|b)*c")
Connect = Callable[[int, object], tuple[PushQueue, PullQueue]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Both ends of a queue for messages of one type."""
    ends: list[PushQueue | PullQueue] = []

    def make(rank: int, types: object) -> tuple[PushQueue, PullQueue]:
        address = addresses.rank(rank)
        push = PushQueue(address, encode)
        pull = PullQueue(address, decoder(types))
        ends.extend([push, pull])
        return push, pull

    with private_folder() as folder:
        addresses = Addresses(folder)
        yield make
        for end in ends:
            end.close()


class Script:
    """An inbox that gives the n-th parcel to the n-th step, and at last the end."""

    def __init__(self, parcels: list[list[SchedulerMsg]]) -> None:
        self._parcels = iter(parcels)
        self.posted: list[SchedulerMsg] = []
        self._num_taken = 0

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        posted = self.posted[self._num_taken :]
        self._num_taken += len(posted)
        for msgs in self._parcels:
            if msgs or posted or not block:
                return [*posted, *msgs]
        return [ExitMsg()]

    def post(self, msg: SchedulerMsg) -> None:
        self.posted.append(msg)


def random_parcels(random: Random, num_steps: int) -> list[list[SchedulerMsg]]:
    parcels: list[list[SchedulerMsg]] = []
    uid = 0
    for _ in range(num_steps):
        msgs: list[SchedulerMsg] = []
        for _ in range(random.choice([0, 0, 1, 2])):
            uid += 1
            prompt = [uid % 3] * random.randint(1, 20) + random.choices(
                range(VOCAB_SIZE), k=random.randint(0, 9)
            )
            msgs.append(
                UserMsg(
                    uid, pack_ids(prompt), SamplingParams(max_tokens=random.choice([None, 5, 20]))
                )
            )
        if random.random() < 0.2:
            msgs.append(AbortMsg(random.randint(0, uid)))
        parcels.append(msgs)
    return parcels


class Rank:
    """A scheduler with an executor of its own, and a clock that no other rank sees."""

    def __init__(self, link: LeaderLink | FollowerLink, target_itl_ms: float | None = 0) -> None:
        self.executor = FakeExecutor(
            make_limits(num_pages=24, page_size=4), num_rows=6, asynchronous=True
        )
        self.book = AnswerBook()
        config = SchedulerConfig(
            overlap=True, seed=5, max_prefill_length=16, target_itl_ms=target_itl_ms
        )
        leads = isinstance(link, LeaderLink)
        random = Random(1)
        times = itertools.accumulate(random.uniform(0, 0.1) for _ in itertools.count())
        self.scheduler = Scheduler(
            config,
            self.executor,
            link,
            self.book,
            leads=leads,
            other_ranks=link,
            clock=partial(next, times),
        )
        self.failure: EngineFailed | None = None

    def run(self) -> None:
        """Step until the end, or until this rank finds that it has left the others."""
        try:
            self.scheduler.run()
        except EngineFailed as failure:
            self.failure = failure

    def sampling(self) -> dict[int, bytes]:
        return {uid: req.sampling_record for uid, req in self.scheduler.requests._live.items()}


def run_group(leader: Rank, followers: list[Rank], pushes: list[PushQueue]) -> None:
    """Run all ranks to their end; followers are threads."""
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in followers]
    for thread in threads:
        thread.start()
    try:
        leader.scheduler.run()
    finally:
        for push, thread in zip(pushes, threads, strict=True):
            push.put(
                BatchSchedulerMsg([ExitMsg()])
            )  # read only by those whom the leader left waiting
            thread.join(timeout=20)


@pytest.mark.parametrize(("seed", "target_itl_ms"), [(0, 0), (1, 60), (2, None)])
def test_leader_and_followers_make_the_same_plans(
    connect: Connect, seed: int, target_itl_ms: float | None
) -> None:
    pushes, pulls = zip(*[connect(i, LeaderMsg) for i in range(NUM_FOLLOWERS)], strict=True)
    followers = [Rank(FollowerLink(pull), target_itl_ms) for pull in pulls]
    script = Script(random_parcels(Random(seed), num_steps=150))
    leader = Rank(LeaderLink(script, list(pushes)), target_itl_ms)
    run_group(leader, followers, list(pushes))

    assert len(leader.executor.plans) > 100
    assert bool(script.posted) == (target_itl_ms != 0)
    for follower in followers:
        assert follower.failure is None
        assert not follower.scheduler.is_running
        assert follower.executor.plans == leader.executor.plans
        assert np.array_equal(follower.executor.page_table_RP, leader.executor.page_table_RP)
        assert follower.book.answers == leader.book.answers
        assert follower.sampling() == leader.sampling()


class DeafLink(FollowerLink):
    """A follower that misses one abort of a request that lives."""

    rank: Rank
    missed: AbortMsg | None = None

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        return [msg for msg in super().receive(block=block) if not self._misses(msg)]

    def _misses(self, msg: SchedulerMsg) -> bool:
        live = self.rank.scheduler.requests._live
        is_of_live = isinstance(msg, AbortMsg) and msg.uid in live
        if self.missed or not is_of_live:
            return False
        assert isinstance(msg, AbortMsg)
        self.missed = msg
        return True


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_that_misses_an_abort_is_found_before_it_launches_another_step(
    connect: Connect, seed: int
) -> None:
    push, pull = connect(0, LeaderMsg)
    link = DeafLink(pull)
    follower = link.rank = Rank(link)
    leader = Rank(LeaderLink(Script(random_parcels(Random(seed), num_steps=150)), [push]))
    run_group(leader, [follower], [push])

    assert link.missed
    num_equal = len(follower.executor.plans)
    assert follower.executor.plans == leader.executor.plans[:num_equal]
    assert f"the ranks plan step {num_equal} differently: " in str(follower.failure)


class ConfusedLink(FollowerLink):
    """A follower that takes an abort of request 1 for one of request 2."""

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        msgs = super().receive(block=block)
        return [AbortMsg(2) if msg == AbortMsg(1) else msg for msg in msgs]


@pytest.mark.parametrize("abort_step", [1, 2, 5])
def test_a_follower_that_runs_another_request_of_equal_length_is_found_in_that_step(
    connect: Connect, abort_step: int
) -> None:
    push, pull = connect(0, LeaderMsg)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    both: list[SchedulerMsg] = [UserMsg(uid, pack_ids([5, 6, 7]), params) for uid in (1, 2)]
    parcels: list[list[SchedulerMsg]] = [both, *([] for _ in range(abort_step - 1))]
    follower = Rank(ConfusedLink(pull))
    leader = Rank(LeaderLink(Script([*parcels, [AbortMsg(1)]]), [push]))
    run_group(leader, [follower], [push])

    assert follower.executor.plans == leader.executor.plans[:abort_step]
    assert f"the ranks plan step {abort_step} differently: slices" in str(follower.failure)


@pytest.mark.parametrize("seed", range(3))
def test_a_follower_that_gives_out_other_pages_is_found_in_that_step(
    connect: Connect, seed: int
) -> None:
    push, pull = connect(0, LeaderMsg)
    follower = Rank(FollowerLink(pull))
    free = follower.scheduler.cache._free
    free[:] = free[::-1].copy()
    leader = Rank(LeaderLink(Script(random_parcels(Random(seed), num_steps=20)), [push]))
    run_group(leader, [follower], [push])

    assert follower.executor.plans == []
    words = "the ranks plan step 0 differently: tables 0x[0-9a-f]+ here, 0x[0-9a-f]+ on rank 0"
    assert re.fullmatch(words, str(follower.failure))


def test_the_digest_of_a_step_says_who_computes_nothing_in_it() -> None:
    digests = {
        StepDigests().next(0, None, RunningPlan(0, idle=idle), history=0)
        for idle in ([], [1], [2], [1, 2])
    }
    assert len(digests) == 4


def test_the_digest_of_a_step_says_which_rows_are_copied() -> None:
    copies = [
        (),
        (RowCopy(0, 1, 8),),
        (RowCopy(2, 1, 8),),
        (RowCopy(0, 2, 8),),
        (RowCopy(0, 1, 4),),
    ]
    plans = [BatchPlan([], replace(NO_WRITES, copies=each)) for each in copies]
    digests = {StepDigests().next(0, plan, RunningPlan(0), history=0) for plan in plans}
    assert len(digests) == 5


def test_who_has_all_tokens_in_flight_computes_nothing() -> None:
    host = Host(overlap=True)
    uid = host.submit([5, 6, 7], exactly(2))
    host.step(2)

    running = host.scheduler.decode.plan(budget=8)
    assert (running.slices, running.idle) == ([], [uid])


def test_who_finds_no_page_computes_nothing() -> None:
    """Each of two requests needs a second page, and one page is left."""
    host = Host(make_limits(num_pages=3, page_size=4), overlap=False, cache="naive")
    uids = [host.submit([n, 6, 7], exactly(8)) for n in range(2)]
    host.step(2)

    running = host.scheduler.decode.plan(budget=8)
    assert [req_slice.req.uid for req_slice in running.slices] == [uids[0]]
    assert (running.idle, running.is_short_of_pages) == ([uids[1]], True)


def grow_without_end(rank: Rank) -> None:
    """Let a rank measure that a grammar takes more than all may."""
    grammars = rank.scheduler.grammars
    grammars._budget = GrammarBudget(grammars.known, max_bytes=0, max_grown_bytes=0)
    [known] = grammars.known.all()
    grammars._budget.grow(known, 2**30)


@pytest.mark.parametrize("leader_measures_it", [False, True])
def test_a_grammar_is_forgotten_when_rank_0_measures_that_it_takes_too_much(
    connect: Connect, leader_measures_it: bool
) -> None:
    push, pull = connect(0, LeaderMsg)
    follower = Rank(FollowerLink(pull))
    parcels: list[list[SchedulerMsg]] = [[AbortMsg(1)], [AbortMsg(1)]]
    leader = Rank(LeaderLink(Script(parcels), [push]))
    ranks = [leader, follower]
    for rank in ranks:
        rank.scheduler.grammars.known.add(GROWN, [], 0)
    grow_without_end(leader if leader_measures_it else follower)
    run_group(leader, [follower], [push])

    assert follower.failure is None
    forgotten = [GROWN not in rank.scheduler.grammars.known for rank in ranks]
    assert forgotten == [leader_measures_it] * 2


def test_a_follower_takes_one_parcel_a_step_even_if_more_have_come(connect: Connect) -> None:
    push, pull = connect(0, LeaderMsg)
    parcels: list[list[SchedulerMsg]] = [[AbortMsg(1)], [], [AbortMsg(2), ExitMsg()]]
    for msgs in parcels:
        push.put(BatchSchedulerMsg(msgs))
    link = FollowerLink(pull)

    assert [link.receive(block=False) for _ in parcels] == parcels


def test_the_leader_passes_on_empty_parcels_too(connect: Connect) -> None:
    push, pull = connect(0, LeaderMsg)
    link = LeaderLink(Script([[], [AbortMsg(1)], []]), [push])
    for _ in range(3):
        link.receive(block=False)

    assert [pull.get().msgs for _ in range(3)] == [[], [AbortMsg(1)], []]


def test_an_inbox_gives_all_that_has_come_in_order(connect: Connect) -> None:
    push, pull = connect(0, SchedulerMsg)
    inbox = ZmqInbox(pull, push)
    assert inbox.receive(block=False) == []

    for uid in range(100):
        push.put(AbortMsg(uid))
    got: list[SchedulerMsg] = []
    while len(got) < 100:
        got += inbox.receive(block=True)
    assert got == [AbortMsg(uid) for uid in range(100)]


def test_what_a_thread_posts_wakes_a_leader_that_waits(connect: Connect) -> None:
    push, pull = connect(0, SchedulerMsg)
    writer, follower = connect(1, LeaderMsg)
    link = LeaderLink(ZmqInbox(pull, push), [writer])
    msg = GrammarCompiledMsg(4)
    thread = threading.Thread(target=link.post, args=(msg,))
    thread.start()
    assert link.receive(block=True) == [msg]
    thread.join()
    assert follower.get().msgs == [msg]


Detokenizers = Callable[[int], PullQueue[BatchDetokenizeMsg | ShutdownMsg]]


@pytest.fixture
def outbox_and_detokenizers() -> Iterator[tuple[ZmqOutbox, Detokenizers]]:
    """An outbox, and a function that opens the inbox of the detokenizer of a life."""
    inboxes: list[PullQueue[BatchDetokenizeMsg | ShutdownMsg]] = []

    def open_inbox(life: int) -> PullQueue[BatchDetokenizeMsg | ShutdownMsg]:
        address = addresses.in_life(DETOKENIZER, life).detokenizer
        inboxes.append(PullQueue(address, decoder(BatchDetokenizeMsg | ShutdownMsg)))
        return inboxes[-1]

    with private_folder() as folder:
        addresses = Addresses(folder)
        outbox = ZmqOutbox(addresses)
        yield outbox, open_inbox
        outbox.close()
        for inbox in inboxes:
            inbox.close()


def test_an_outbox_sends_the_news_of_a_step_as_one_message(
    outbox_and_detokenizers: tuple[ZmqOutbox, Detokenizers],
) -> None:
    outbox, open_inbox = outbox_and_detokenizers
    pull = open_inbox(0)
    news = [DetokenizeMsg(1, [5]), DetokenizeMsg(2, finish="abort")]
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 8)
    outbox.send(news, None)
    outbox.send([], stats)

    assert pull.get() == BatchDetokenizeMsg(news)
    assert pull.get() == BatchDetokenizeMsg([], stats)


def test_an_outbox_says_which_epoch_the_numbers_are_of() -> None:
    with private_folder() as folder:
        addresses = Addresses(folder, epoch=3)
        inbox = PullQueue(addresses.detokenizer, decoder(BatchDetokenizeMsg | ShutdownMsg))
        outbox = ZmqOutbox(addresses)
        outbox.send([], EngineStats(1, 2, 3, 4, 5, 6, 7, 8))
        assert inbox.get().stats == EngineStats(1, 2, 3, 4, 5, 6, 7, 8, epoch=3)
        outbox.close()
        inbox.close()


@pytest.mark.parametrize(("num_tokenizer", "ends"), [(0, []), (1, [ShutdownMsg()])])
def test_a_detokenizer_of_its_own_is_ended_by_the_outbox(
    num_tokenizer: int, ends: list[ShutdownMsg], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API process has ended one that also tokenizes. A message would wait for it a second."""
    sent = []
    put = PushQueue.put

    def watch(queue: PushQueue[Any], msg: Any) -> None:
        sent.append(msg)
        put(queue, msg)

    monkeypatch.setattr(PushQueue, "put", watch)
    news = [DetokenizeMsg(1, [5])]
    with private_folder() as folder:
        addresses = Addresses(folder, num_tokenizer)
        inbox = PullQueue(addresses.detokenizer, decoder(BatchDetokenizeMsg | ShutdownMsg))
        outbox = ZmqOutbox(addresses)
        outbox.send(news, None)
        outbox.close()
        received = [inbox.get() for _ in range(1 + len(ends))]
        inbox.close()
    assert received == sent == [BatchDetokenizeMsg(news), *ends]


def test_an_outbox_follows_the_detokenizer_to_its_latest_life(
    outbox_and_detokenizers: tuple[ZmqOutbox, Detokenizers],
) -> None:
    """A message of each life comes from every tokenizer, and so also a late one."""
    outbox, open_inbox = outbox_and_detokenizers
    first = [DetokenizeMsg(1, [5])]
    second = [DetokenizeMsg(2, [6])]
    outbox.send(first, None)
    outbox.redirect(2)
    outbox.send(second, None)
    outbox.redirect(1)
    outbox.redirect(2)
    outbox.send(second, None)

    pull = open_inbox(2)
    assert [pull.get() for _ in range(2)] == [BatchDetokenizeMsg(second)] * 2
