"""Messages on the wire: what goes in comes out, and what is no such message is refused."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import deque
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minisgl.message as package
from minisgl.core import Grammar, SamplingParams, TokenLogprobs
from minisgl.errors import InvalidRequest, PromptTooLong, QueueFull, RequestError, UnknownModel
from minisgl.message import (
    AbortMsg,
    BaseMsg,
    BatchDetokenizeMsg,
    BatchFrontendMsg,
    BatchSchedulerMsg,
    CodecReply,
    Conversation,
    DecodeMsg,
    DetokenizeMsg,
    EncodeMsg,
    EndMsg,
    EngineStats,
    ExitMsg,
    FlushCacheMsg,
    ForgetGrammarMsg,
    FrontendMsg,
    GrammarCompiledMsg,
    GrammarVerdictMsg,
    KeyLimitsMsg,
    LeaderMsg,
    MatchState,
    MatchStatesMsg,
    MetricSample,
    MetricsQuery,
    MetricsReply,
    NewDetokenizerMsg,
    PeerMsg,
    RefuseMsg,
    ReplaceMsg,
    ReplyError,
    ResumeMsg,
    SchedulerMsg,
    ServeMsg,
    ShutdownMsg,
    StepCostsMsg,
    StepDigestMsg,
    SuspendMsg,
    TextLogprobs,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    decoder,
    encode,
    pack_ids,
    unpack_ids,
)
from minisgl.sampling_params import MAX_COUNT, MAX_SEED, MIN_SEED
from minisgl.worker_info import SchedulerInfo, TokenizerInfo

SAMPLING = SamplingParams(
    max_tokens=5,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    seed=-7,
    ignore_eos=True,
    stop=("a", "b"),
    logit_bias={5: -1.5},
)
ERROR = ReplyError(400, "invalid_value", "prompt 'ä' is bad", param="prompt")
CHAT = [{"role": "user", "content": "grüß 神"}, {"role": "assistant", "content": ""}]
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_pages_used=3,
    num_pages=4,
    num_retractions=5,
    num_steps=6,
    num_computed_tokens=7,
    num_cached_tokens=8,
    budget_tokens=9,
    budget_ms=10.5,
    flushes=[(11, 12)],
    epoch=13,
)
WORKERS = [SchedulerInfo(9, "cpu"), TokenizerInfo("{{ messages }}", {"<s>": 1})]
ROUND_TRIPS: list[tuple[Any, BaseMsg]] = [
    (SchedulerMsg, UserMsg(1, pack_ids([1, 2, 3]), SAMPLING)),
    (SchedulerMsg, UserMsg(2**63 - 1, b"", SamplingParams())),
    (SchedulerMsg, AbortMsg(2)),
    (SchedulerMsg, GrammarVerdictMsg(3, "the grammar is refused", 5)),
    (SchedulerMsg, GrammarCompiledMsg(3)),
    (SchedulerMsg, GrammarCompiledMsg(3, "the grammar is refused")),
    (SchedulerMsg, GrammarCompiledMsg(3, "no memory", is_refused=False)),
    (SchedulerMsg, ForgetGrammarMsg(Grammar("regex", "a+"), (2**63 - 1,), "too much")),
    (SchedulerMsg, StepCostsMsg((1e-3, 0.0, 2e-5, 1e-300, 0.1, 1 / 3))),
    (SchedulerMsg, ExitMsg()),
    (TokenizerMsg, FlushCacheMsg(3)),
    (SchedulerMsg, NewDetokenizerMsg(2)),
    (TokenizerMsg, NewDetokenizerMsg(2)),
    (BatchSchedulerMsg, BatchSchedulerMsg([])),
    (LeaderMsg, MatchStatesMsg({2**63 - 1: MatchState([5, 6], True, "too much"), 0: MatchState()})),
    (StepDigestMsg, StepDigestMsg(7, 2, 3, slices=-(2**63), tables=2**32 - 1)),
    (
        BatchSchedulerMsg,
        BatchSchedulerMsg([UserMsg(1, b"", SAMPLING), AbortMsg(1), ExitMsg()]),
    ),
    (TokenizerMsg, TokenizeMsg(3, "text \0 and \U0001f600", SAMPLING)),
    (
        TokenizerMsg,
        TokenizeMsg(3, Conversation(CHAT, {"add_generation_prompt": False}, {"a": [1]}), SAMPLING),
    ),
    (TokenizerMsg, TokenizeMsg(3, TokenIds(pack_ids([5, 6])), SAMPLING)),
    (TokenizerMsg, EncodeMsg(3, "text \0", add_special_tokens=False)),
    (TokenizerMsg, EncodeMsg(3, Conversation(CHAT))),
    (TokenizerMsg, DecodeMsg(3, pack_ids([5, 6]))),
    (FrontendMsg, CodecReply(3, ids=pack_ids([5, 6]))),
    (FrontendMsg, CodecReply(3, text="ä", error=ERROR)),
    (TokenizerMsg, AbortMsg(4)),
    (TokenizerMsg, ShutdownMsg()),
    (TokenizerMsg, ShutdownMsg(stops_scheduler=True)),
    (
        TokenizerMsg,
        BatchDetokenizeMsg(
            [DetokenizeMsg(1, [0, 9]), DetokenizeMsg(2, finish="stop"), DetokenizeMsg(3)]
        ),
    ),
    (
        TokenizerMsg,
        BatchDetokenizeMsg([DetokenizeMsg(1, [7], [TokenLogprobs(-0.5, [(3, -0.25)])], SAMPLING)]),
    ),
    (TokenizerMsg, BatchDetokenizeMsg([DetokenizeMsg(1, error=ERROR, num_prompt=5, num_cached=4)])),
    (TokenizerMsg, BatchDetokenizeMsg([], STATS)),
    (FrontendMsg, BatchFrontendMsg([], STATS)),
    (FrontendMsg, UserReply(5, "more", num_prompt=1, num_cached=2, num_output=3)),
    (FrontendMsg, UserReply(5, finish="length", embedding=b"\0\xff")),
    (FrontendMsg, UserReply(5, finish="length", prompt_logprobs=[TextLogprobs(b"a", None, [])])),
    (
        FrontendMsg,
        UserReply(5, finish="length", logprobs=[TextLogprobs(b"\xf0", -0.5, [(b"b", -0.25)])]),
    ),
    (FrontendMsg, BatchFrontendMsg([UserReply(5, error=ERROR), UserReply(6)])),
    (PeerMsg, ServeMsg(WORKERS, 1, b"\0\xff", "[a]")),
    (PeerMsg, SuspendMsg("it died", 3)),
    (PeerMsg, ResumeMsg(2)),
    (PeerMsg, ReplaceMsg("tokenizer-0", 1, "it died")),
    (PeerMsg, KeyLimitsMsg("[a]", 1)),
    (PeerMsg, RefuseMsg("going")),
    (PeerMsg, EndMsg("gone")),
    (PeerMsg, MetricsQuery(1, 7)),
    (PeerMsg, MetricsReply(7, [MetricSample("a_total", {"route": "/"}, 0.5)])),
]


@pytest.mark.parametrize(("types", "msg"), ROUND_TRIPS)
def test_a_message_survives_the_wire(types: Any, msg: BaseMsg) -> None:
    back = decoder(types)(encode(msg))

    assert back == msg
    assert type(back) is type(msg)


def test_every_message_is_tried() -> None:
    classes = {value for value in vars(package).values() if isinstance(value, type)}
    messages = {cls for cls in classes if issubclass(cls, BaseMsg)}
    concrete = {cls for cls in messages if not cls.__name__.startswith("Base")}
    tried = {type(msg) for _, msg in ROUND_TRIPS} | {
        DetokenizeMsg,
        Conversation,
        TextLogprobs,
        EngineStats,
        MatchState,
        MetricSample,
        ReplyError,
        TokenIds,
    }  # fields of other messages

    assert tried == concrete


@pytest.mark.parametrize(
    "types", [SchedulerMsg, BatchSchedulerMsg, LeaderMsg, TokenizerMsg, FrontendMsg, PeerMsg]
)
def test_a_message_of_another_process_is_refused(types: Any) -> None:
    accepted = {BatchSchedulerMsg} if types is BatchSchedulerMsg else set(get_args(types))
    foreign = [msg for _, msg in ROUND_TRIPS if type(msg) not in accepted]

    assert foreign
    for msg in foreign:
        with pytest.raises(msgspec.ValidationError, match=r"Invalid value|Expected `array`"):
            decoder(types)(encode(msg))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "AbortMsg"},
        {"type": "AbortMsg", "uid": "1"},
        {"type": "AbortMsg", "uid": None},
        {"type": "AbortMsg", "uid": 1.5},
        {"uid": 1},
        {"type": "UserMsg", "uid": 1, "input_ids": "text", "sampling": {}},
        {"type": "UserMsg", "uid": 1, "input_ids": b"", "sampling": {"temperature": "hot"}},
        {"type": "UserMsg", "uid": 1, "input_ids": b"", "sampling": None},
        {"type": "NoSuchMsg", "uid": 1},
        [1, 2],
        None,
    ],
)
def test_a_wrong_field_is_refused(fields: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(SchedulerMsg)(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", b"\x81", encode(AbortMsg(1))[:-1], encode(AbortMsg(1)) + b"x"],
)
def test_what_is_no_msgpack_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoder(SchedulerMsg)(raw)


@given(raw=st.binary(max_size=40))
@settings(max_examples=300, derandomize=True, database=None, deadline=None)
def test_random_bytes_raise_nothing_else(raw: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):  # the root of ValidationError too
        decoder(TokenizerMsg)(raw)


def test_sampling_parameters_out_of_bounds_are_refused_on_arrival() -> None:
    raw = encode(UserMsg(1, b"", SAMPLING)).replace(
        msgspec.msgpack.encode(0.9), msgspec.msgpack.encode(9.9)
    )

    with pytest.raises((msgspec.ValidationError, InvalidRequest), match="top_p"):
        decoder(SchedulerMsg)(raw)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(0, MAX_COUNT),
        temperature=st.floats(0, 100) | st.integers(0, 100),
        top_k=st.none() | st.integers(1, MAX_COUNT),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(MIN_SEED, MAX_SEED),
        ignore_eos=st.booleans(),
    )
)
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
def test_all_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    assert decoder(SchedulerMsg)(encode(UserMsg(1, b"", params))).sampling == params


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        AbortMsg(1).uid = 2  # type: ignore[misc]


# --- token ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30))
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_ids_come_back_from_a_list_or_an_array(ids: list[int]) -> None:
    packed = pack_ids(ids)

    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed).tolist() == ids
    assert (
        pack_ids(np.array(ids, dtype=np.int32)) == pack_ids(np.array(ids, dtype=np.int64)) == packed
    )


def test_ids_are_little_endian_on_every_machine() -> None:
    assert pack_ids([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert unpack_ids(b"\x01\0\0\0").dtype == np.int32


def test_unpacked_ids_are_a_view_that_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack_ids(pack_ids([1]))[0] = 2


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**40])
def test_an_id_that_does_not_fit_is_not_wrapped(bad: int) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        pack_ids([bad])


@pytest.mark.parametrize(
    "flag", [True, np.bool_(True), np.array(True), torch.tensor(True)], ids=lambda flag: repr(flag)
)
def test_a_flag_among_ids_is_refused(flag: Any) -> None:
    for ids in ([flag], [3, flag], (np.int64(3), flag), deque([torch.tensor(3), flag])):
        with pytest.raises(InvalidRequest, match="token ids must be a list of integers"):
            pack_ids(ids)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([3, 2.5, "x"], "2.5"),
        ([3, "x"], "'x'"),
        ([[1], [2, 3]], r"\[1\]"),
        (np.array([0.5, 1.0]), r"np.float64\(0.5\)"),
        (torch.tensor([0.5]), r"tensor\(0.5000\)"),
        (torch.tensor(7), r"tensor\(7\)"),
        ([3, True], "True"),
        (b"ab", "b'ab'"),
        ({1, 2}, r"\{1, 2\}"),
        (itertools.count(5), r"count\(5\)"),
        (None, "None"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_id_is_named(ids: Any, named: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^token ids must be a list of integers, got {named}$"
    ):
        pack_ids(ids)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([3, 2**31, -(2**40)], 2**31),
        ([-(2**40)], -(2**40)),
        (np.array([1, 2**40]), 2**40),
        ([2**63, -1], 2**63),
        ([10**30], 10**30),
    ],
)
def test_an_id_out_of_bounds_is_named_with_them(ids: Any, named: int) -> None:
    bounds = re.escape(f"[{-(2**31)}, {2**31 - 1}]")
    with pytest.raises(InvalidRequest, match=f"^token ids must be in {bounds}, got {named}$"):
        pack_ids(ids)


def test_ids_may_be_integers_of_any_library() -> None:
    assert pack_ids([1, np.int64(2), np.array(3), torch.tensor(4)]) == pack_ids([1, 2, 3, 4])


def test_ids_cut_in_the_middle_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\x01\0\0")


# --- replies


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequest("bad", param="top_p"), 400, "invalid_value", "top_p"),
        (PromptTooLong(12, "you requested 15 tokens"), 400, "context_length_exceeded", None),
        (UnknownModel("a", "b"), 404, "model_not_found", "model"),
        (QueueFull(1, 8, 8), 429, "queue_full", None),
    ],
)
def test_an_error_keeps_its_status_code_and_words(
    error: RequestError, status: int, code: str, param: str
) -> None:
    reply = ReplyError.of(error)

    assert (reply.status, reply.code, reply.param, reply.message) == (
        status,
        code,
        param,
        str(error),
    )


def test_a_reply_with_a_finish_or_an_error_is_the_last() -> None:
    assert not UserReply(1, "text").is_final
    assert UserReply(1, finish="stop").is_final
    assert UserReply(1, error=ERROR).is_final
