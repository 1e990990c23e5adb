"""The texts of an answer, joined, are the decode of all its ids; none is held back without need.

Several tokens in a message give what those tokens give one at a time. The exception is a run of
byte tokens that are not all characters: Rust's tokenizers make each of them a U+FFFD. As in
sentencepiece itself, the characters among them are kept here.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg, ReplyError, UserReply
from minisgl.tokenizer import Detokenizer, Tokenizer
from minisgl.tokenizer.detokenize import StopTexts

TINY = ["byte level", "byte fallback"]
WHOLE_PIECES = ["word pieces", "metaspace"]
# An id that no tokenizer here has: a model often has more rows than its tokenizer has tokens.
OUTSIDE = 100_000
TEXTS = [
    "naïve café",
    "语言模型",
    "👩‍👩‍👧‍👦 family",
    "🇩🇪🇫🇷",
    "a  b   c",
    " a",
    "\n\n a\t",
    "e\u0301",
    "\ufffd a \ufffd",
    "...",
]

names = pytest.mark.parametrize("name", [*TINY, pytest.param("default", marks=pytest.mark.slow)])
many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
some_bytes = st.binary(max_size=8) | st.sampled_from(
    [b"\xf0\x9f", b"\xe8\xaf\xad", b"\xff", b" ", b"\xe2\x96\x81"]
)
specials = st.integers(0, 3) | st.just(OUTSIDE)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token that stands for one byte."""
    vocab = tokenizer._tokenizer.get_vocab()
    spelled = f"<0x{byte:02X}>"
    return vocab[spelled] if spelled in vocab else vocab[_letter_of(byte)]


def _letter_of(byte: int) -> str:
    """GPT-2's spelling of a byte: itself if it is printable, else the next free letter from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def ids_of(tokenizer: Tokenizer, parts: Sequence[str | bytes | int]) -> list[int]:
    """Texts are encoded, bytes become byte tokens, ids stay."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part).tolist()
        elif isinstance(part, int):
            ids.append(part)
        else:
            ids += [byte_id(tokenizer, byte) for byte in part]
    return ids


def whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids without special tokens: what the tokenizer says, but for broken characters.

    Rust's tokenizers make all of a run of byte tokens U+FFFD if it is not all characters.
    """
    said = tokenizer.decode(ids)
    if "<0x00>" not in tokenizer._tokenizer.get_vocab():
        return said
    pieces = [tokenizer._tokenizer.convert_ids_to_tokens(token) for token in ids]
    shown = [piece for piece in pieces if piece not in (None, "<unk>", "<s>", "</s>")]
    text = characters_of(b"".join(map(_bytes_of, shown))).removeprefix(" ")
    if "\ufffd" not in text:
        assert text == said
    return text


def _bytes_of(piece: str) -> bytes:
    if re.fullmatch("<0x..>", piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


def characters_of(raw: bytes) -> str:
    """The characters of bytes; each byte that is part of none is U+FFFD."""
    text = ""
    while raw:
        sizes = [size for size in range(1, 5) if is_character(raw[:size])]
        text += raw[: sizes[0]].decode() if sizes else "\ufffd"
        raw = raw[sizes[0] if sizes else 1 :]
    return text


def is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


def new(tokenizer: Tokenizer) -> Detokenizer:
    return tokenizer.make_detokenizer()


def pieces(
    detokenizer: Detokenizer, ids: list[int], last: DetokenizeMsg | None = None
) -> list[str]:
    """Texts of one message an id. The last id ends the answer unless a last message is given."""
    ends = [None] * len(ids)
    if last is None:
        ends[-1] = "length"
    msgs = [DetokenizeMsg(0, [token], finish=end) for token, end in zip(ids, ends, strict=True)]
    return [detokenizer.make_reply(msg).text for msg in msgs + ([last] if last else [])]


parts = st.lists(
    st.sampled_from(TEXTS) | st.text(max_size=5) | some_bytes | specials, min_size=1, max_size=12
)


@pytest.mark.parametrize("name", TINY)
@given(parts=parts)
@example(
    parts=[b"A", 2, b"\xff"]
)  # a special token inside a run of bytes: the run is decoded as one
@example(parts=[b"A", OUTSIDE, b"\xff"])
@example(parts=[b"\xe8", 2, b"\xaf\xad"])
@many
def test_the_pieces_are_the_decode_of_all_ids(
    name: str, parts: list[str | bytes | int], tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = ids_of(tokenizer(name), parts) or [0]
    detokenizer = new(tokenizer(name))
    assert "".join(pieces(detokenizer, ids)) == whole_text(tokenizer(name), ids)
    assert detokenizer.num_open == 0


@pytest.mark.parametrize("name", [*TINY, *WHOLE_PIECES])
@pytest.mark.parametrize("skips", [True, False])
@given(ids=st.lists(st.integers(0, 2) | st.integers(0, 330) | st.just(OUTSIDE), max_size=30))
@many
def test_the_pieces_of_any_ids_are_their_decode(
    name: str, skips: bool, ids: list[int], tokenizer: Callable[[str], Tokenizer]
) -> None:
    params = SamplingParams(skip_special_tokens=skips)
    msgs = [DetokenizeMsg(0, [token]) for token in ids] + [DetokenizeMsg(0, finish="length")]
    msgs[0] = structs.replace(msgs[0], params=params)
    detokenizer = new(tokenizer(name))
    text = "".join(detokenizer.make_reply(msg).text for msg in msgs)
    expected = tokenizer(name).decode(ids, skip_special_tokens=skips)
    if "\ufffd" not in expected:  # else see the test above
        assert text == expected


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("begin", [[], [0]], ids=["of a prompt", "behind a special token"])
@given(parts=parts)
@example(parts=[" a", 2, "a"])
@example(parts=[b"\xe8\xaf", "a"])
@example(parts=[b"\xff", b"\xe8", OUTSIDE, b"\xaf", "a"])
@example(parts=[b"\xed\xa0", 259])
@many
def test_a_token_of_whole_characters_starts_behind_the_text_of_those_before_it(
    name: str, begin: list[int], parts: list[Any], tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = ids_of(tokenizer(name), parts) or [0]
    entries = [TokenLogprobs(-1.0, [])] * len(ids)
    msg = DetokenizeMsg(0, ids, entries, finish="length", prompt_tail=begin)
    reply = new(tokenizer(name)).make_reply(msg)
    assert reply is not None
    starts = [entry.start for entry in reply.logprobs]
    assert starts == sorted(starts)
    for at, entry in enumerate(reply.logprobs):
        if tokenizer(name).decode([ids[at]]) and "\ufffd" not in entry.text:
            assert entry.start == len(whole_text(tokenizer(name), ids[:at]))


@pytest.mark.parametrize(
    ("parts", "starts"),
    [
        ([b"a", b"\xc3\xa9", b"b"], [0, 1, 1, 2]),
        ([b"a", b"\xc3", b"b", b"c"], [0, 1, 2, 3]),
        ([b"\xf0\x9f", b"a"], [0, 0, (1, 2)]),
        ([b"\xf0\x9f\xff", b"a"], [0, 0, (1, 2), (2, 3)]),
        ([b"\xc3", 2, b"\xc3\xc3\xa9", b"a"], [0, 0, 1, 2, 2, 3]),
        ([b"\xed\xa0", b"a"], [0, 1, 2]),
        ([b"\xef\xbf\xbd", b"a"], [0, 0, 0, 1]),
        ([b"\xef\xbf\xef\xbf\xbd", b"a"], [0, 0, (1, 2), (1, 2), (1, 2), (2, 3)]),
    ],
    ids=[
        "whole",
        "two bytes",
        "three tokens",
        "goes on",
        "twice",
        "a surrogate",
        "a true U+FFFD",
        "one behind",
    ],
)
@pytest.mark.parametrize("name", TINY)
def test_the_token_that_breaks_a_character_starts_behind_it(
    name: str,
    parts: list[Any],
    starts: list[int | tuple[int, int]],
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    """Its U+FFFD is of the tokens that have begun it: one, or one a byte with a byte fallback."""
    ids = ids_of(tokenizer(name), parts)
    entries = [TokenLogprobs(-1.0, [])] * len(ids)
    reply = new(tokenizer(name)).make_reply(DetokenizeMsg(0, ids, entries, finish="length"))
    assert reply is not None
    kind = TINY.index(name)
    expected = [each if isinstance(each, int) else each[kind] for each in starts]
    assert [entry.start for entry in reply.logprobs] == expected


def one_message_a_token(msg: DetokenizeMsg) -> list[DetokenizeMsg]:
    """Messages of at most one token that say together what `msg` says."""
    if not msg.tokens:
        return [msg]
    logprobs = [[entry] for entry in msg.logprobs] or [[]] * len(msg.tokens)
    singles = [
        DetokenizeMsg(msg.uid, [token], entry)
        for token, entry in zip(msg.tokens, logprobs, strict=True)
    ]
    singles[0] = structs.replace(singles[0], params=msg.params)
    singles[-1] = structs.replace(singles[-1], finish=msg.finish, error=msg.error)
    return singles


def joined(replies: Sequence[UserReply | None]) -> UserReply | None:
    """Replies to several messages as the reply to one message that says the same."""
    given = [reply for reply in replies if reply is not None]
    if not given:
        return None
    text = "".join(reply.text for reply in given)
    logprobs = [entry for reply in given for entry in reply.logprobs]
    return structs.replace(given[-1], text=text, logprobs=logprobs)


some_stops = st.sampled_from(["a", "ab", "b ", "语", "é", "\ufffd", "..", " a", "\n\n", "👩‍👩"])
ends = st.sampled_from(
    [
        {"finish": "stop"},
        {"finish": "length"},
        {"finish": "abort"},
        {"error": ReplyError(500, "engine_failed", "the engine is gone")},
    ]
)


@pytest.mark.parametrize("name", TINY)
@given(
    parts=parts,
    cuts=st.lists(st.integers(0, 40), max_size=8),
    stops=st.lists(some_stops, max_size=3),
    end=ends,
    has_logprobs=st.booleans(),
)
@example(
    parts=["a", b"\xe8\xaf\xad"], cuts=[], stops=[], end={"finish": "length"}, has_logprobs=False
)  # what comes before a run of bytes is certain, even if the run follows in the same message
@example(parts=["ab", "a", "b"], cuts=[1], stops=["ab"], end={"finish": "stop"}, has_logprobs=True)
@many
def test_several_tokens_in_a_message_are_those_tokens_one_at_a_time(
    name: str,
    parts: list[str | bytes | int],
    cuts: list[int],
    stops: list[str],
    end: dict[str, Any],
    has_logprobs: bool,
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    ids = ids_of(tokenizer(name), parts)
    entries = [TokenLogprobs(-float(at), [(token, -0.5)]) for at, token in enumerate(ids)]
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    msgs = [
        DetokenizeMsg(0, ids[begin:end], entries[begin:end] if has_logprobs else [])
        for begin, end in itertools.pairwise(bounds)
    ]
    msgs[0] = structs.replace(msgs[0], params=SamplingParams(stop=tuple(stops)))
    msgs[-1] = structs.replace(msgs[-1], **end)

    together = new(tokenizer(name))
    one_by_one = new(tokenizer(name))
    for msg in msgs:
        expected = joined([one_by_one.make_reply(single) for single in one_message_a_token(msg)])
        assert together.make_reply(msg) == expected
    assert together.num_open == 0


@pytest.mark.parametrize("a_message", [1, 6])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "num_tokens"),
    [
        ("b", 0, "a", 2),
        ("b", 1, "a", 2),
        ("b", 2, "aba", 4),
        ("ba", 2, "a", 3),
        ("ba", 3, "aba", 5),
        ("ab", 5, "abab", 6),
        ("b", 6, "ababab", 6),
    ],
)
def test_a_stop_text_that_the_least_tokens_complete_is_passed_over(
    stop: str,
    min_tokens: int,
    text: str,
    num_tokens: int,
    a_message: int,
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    ids = ids_of(tokenizer("byte level"), [b"ababab"])
    detokenizer = new(tokenizer("byte level"))
    params = SamplingParams(stop=(stop,), min_tokens=min_tokens)
    replies = []
    for begin in range(0, len(ids), a_message):
        tokens = ids[begin : begin + a_message]
        finish = "length" if begin + len(tokens) == len(ids) else None
        replies.append(
            detokenizer.make_reply(DetokenizeMsg(0, tokens, params=params, finish=finish))
        )
    answered = [reply for reply in replies if reply is not None]
    assert "".join(reply.text for reply in answered) == text
    assert answered[-1].num_output == num_tokens


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_says_stop_is_shown_if_asked_for(
    include: bool, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = ids_of(tokenizer("byte level"), [b"ab"])
    params = SamplingParams(stop_token_ids=(ids[1],), include_stop_str_in_output=include)
    reply = new(tokenizer("byte level")).make_reply(
        DetokenizeMsg(0, ids, params=params, finish="stop")
    )
    assert reply is not None
    assert (reply.text, reply.num_output) == ("ab" if include else "a", 2)


@pytest.mark.parametrize("end", [{}, {"finish": "length"}], ids=["goes on", "ends"])
def test_what_follows_a_stop_text_in_its_message_is_dropped(
    end: dict[str, Any], tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = ids_of(tokenizer("byte level"), [b"abcd"])
    entries = [TokenLogprobs(-float(at), []) for at in range(4)]
    detokenizer = new(tokenizer("byte level"))
    reply = detokenizer.make_reply(
        DetokenizeMsg(0, ids, entries, params=SamplingParams(stop=("bc",)), **end)
    )
    assert reply is not None
    assert (reply.text, reply.finish, reply.num_output) == ("a", "stop", 3)
    assert reply.stop_text == "bc"
    assert [entry.logprob for entry in reply.logprobs] == [0.0, -1.0, -2.0]
    assert detokenizer.num_open == (0 if end else 1)  # until the scheduler's last message


@names
def test_the_pieces_of_long_random_ids_are_their_decode(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    dice = random.Random(0)
    vocab_size = len(tokenizer(name)._tokenizer)
    for length in (1, 2, 17, 18, 40, 300):
        for _ in range(10):
            ids = [dice.randrange(vocab_size) for _ in range(length)]
            text = "".join(pieces(new(tokenizer(name)), ids))
            assert text == whole_text(tokenizer(name), ids), ids


@names
@pytest.mark.parametrize("text", [*TEXTS, "".join(TEXTS) * 9])
def test_the_pieces_of_a_text_are_that_text(
    name: str, text: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer(name).encode(text).tolist()
    assert "".join(pieces(new(tokenizer(name)), ids)) == tokenizer(name).decode(ids) == text


@names
def test_text_is_handed_out_as_soon_as_it_is_certain(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer(name).encode("ab 语 é ab. 👍 a" * 12).tolist()
    detokenizer = new(tokenizer(name))
    shown = ""
    for end, token in enumerate(ids, start=1):
        shown += detokenizer.make_reply(DetokenizeMsg(0, [token])).text
        so_far = tokenizer(name).decode(ids[:end])
        if not so_far.endswith("\ufffd"):
            assert shown == so_far


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "last",
    [
        DetokenizeMsg(0, [2], finish="stop"),
        DetokenizeMsg(0, finish="abort"),
        DetokenizeMsg(0, error=ReplyError(500, "engine_failed", "the engine is gone")),
    ],
    ids=["stop", "abort", "error"],
)
def test_what_is_held_back_comes_with_the_end_whatever_ends_it(
    name: str, last: DetokenizeMsg, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = ids_of(tokenizer(name), [b"ab\xf0\x9f"])
    detokenizer = new(tokenizer(name))
    texts = pieces(detokenizer, ids, last)
    assert not any("\ufffd" in text for text in texts[:-1])
    assert "".join(texts) == whole_text(tokenizer(name), ids)
    assert "\ufffd" in texts[-1]
    assert detokenizer.num_open == 0


@pytest.mark.parametrize("name", TINY)
def test_the_token_that_says_stop_is_counted_and_not_shown(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    (visible,) = ids_of(tokenizer(name), [b"."])
    reply = new(tokenizer(name)).make_reply(DetokenizeMsg(0, [visible], finish="stop"))
    assert (reply.text, reply.num_output, reply.finish) == ("", 1, "stop")
    reply = new(tokenizer(name)).make_reply(DetokenizeMsg(0, [visible], finish="length"))
    assert (reply.text, reply.num_output, reply.finish) == (".", 1, "length")


@pytest.mark.parametrize("name", TINY)
def test_answers_that_grow_at_once_do_not_mix(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    dice = random.Random(1)
    left = {
        uid: ids_of(tokenizer(name), [text, b"\xf0\x9f", "end"]) for uid, text in enumerate(TEXTS)
    }
    expected = {uid: whole_text(tokenizer(name), ids) for uid, ids in left.items()}
    detokenizer = new(tokenizer(name))
    shown = dict.fromkeys(left, "")
    while left:
        uid = dice.choice(sorted(left))
        token = left[uid].pop(0)
        shown[uid] += detokenizer.make_reply(
            DetokenizeMsg(uid, [token], finish=None if left[uid] else "length")
        ).text
        if not left[uid]:
            del left[uid]
        assert detokenizer.num_open <= len(expected)
    assert shown == expected
    assert detokenizer.num_open == 0


def test_a_uid_may_come_again_after_its_end(tokenizer: Callable[[str], Tokenizer]) -> None:
    ids = ids_of(tokenizer("byte level"), ["the dog"])
    detokenizer = new(tokenizer("byte level"))
    assert "".join(pieces(detokenizer, ids)) == "".join(pieces(detokenizer, ids)) == "the dog"


def test_an_end_without_a_token_says_the_counts_it_was_given(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    detokenizer = new(tokenizer("byte level"))
    detokenizer.make_reply(DetokenizeMsg(3, [7]))
    reply = detokenizer.make_reply(DetokenizeMsg(3, finish="abort", num_prompt=5, num_cached=4))
    assert (reply.num_prompt, reply.num_cached, reply.num_output) == (5, 4, 1)
    assert detokenizer.num_open == 0


def test_log_probabilities_of_a_prompt_have_the_texts_of_its_tokens(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    ids = ids_of(tokenizer("byte level"), [0, "ab", b"\xf0"])
    entries = [(ids[0], None), *((token, TokenLogprobs(-1.0, [(0, -0.5)])) for token in ids[1:])]
    reply = new(tokenizer("byte level")).make_reply(
        DetokenizeMsg(1, finish="length", prompt_logprobs=entries)
    )
    assert reply is not None
    assert reply.prompt_logprobs is not None
    texts = [tokenizer("byte level").decode([token], skip_special_tokens=False) for token in ids]
    assert [entry.text for entry in reply.prompt_logprobs] == texts
    assert [entry.token for entry in reply.prompt_logprobs[-3:]] == [b"a", b"b", b"\xf0"]
    assert texts[0]
    ends = list(itertools.accumulate(map(len, texts)))
    assert [entry.start for entry in reply.prompt_logprobs] == [0, *ends[:-1]]
    assert (reply.prompt_logprobs[0].logprob, reply.prompt_logprobs[0].top) == (None, [])
    assert {(entry.logprob, *entry.top) for entry in reply.prompt_logprobs[1:]} == {
        (-1.0, (texts[0].encode(), -0.5))
    }
    assert (reply.text, reply.num_output) == ("", 0)


@pytest.mark.parametrize("name", TINY)
def test_the_bytes_of_tokens_are_those_of_their_text(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer(name).encode("ab 语 é 👍", add_special_tokens=False).tolist()
    entries = [TokenLogprobs(-1.0, [(ids[0], -1.0)])] * len(ids)
    reply = new(tokenizer(name)).make_reply(DetokenizeMsg(1, ids, entries, finish="length"))
    assert reply is not None
    raw = b"".join(entry.token for entry in reply.logprobs)
    assert raw.decode().lstrip(" ") == reply.text == "ab 语 é 👍"
    assert {entry.top[0][0] for entry in reply.logprobs} == {reply.logprobs[0].token}
    assert b"\xf0" in [entry.token[:1] for entry in reply.logprobs]


class CountingTokenizer:
    """A tokenizer that counts the ids that it is given to decode or to name."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_ids = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.num_ids += len(ids)
        text: str = self._tokenizer.decode(ids, **options)
        return text

    def convert_ids_to_tokens(self, token: int) -> str | None:
        self.num_ids += 1
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return piece


@pytest.mark.parametrize("name", TINY)
def test_a_detokenizer_that_is_ready_knows_all_tokens(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    counted = copy.copy(tokenizer(name))
    counted._tokenizer = CountingTokenizer(counted._tokenizer)
    counted.__dict__.pop("_vocabulary", None)
    ids = tokenizer(name).encode("ab 语 é 👍", add_special_tokens=False).tolist()
    detokenizer = new(counted)
    detokenizer.get_ready()
    num_ids = counted._tokenizer.num_ids
    reply = detokenizer.make_reply(DetokenizeMsg(1, ids, finish="length"))
    assert reply is not None
    assert reply.text == "ab 语 é 👍"
    assert counted._tokenizer.num_ids == num_ids > 200


@pytest.mark.parametrize("name", [*TINY, *WHOLE_PIECES])
@pytest.mark.parametrize("kind", ["special", "lone bytes", "unknown", "bytes of characters", "any"])
@pytest.mark.parametrize("skips", [True, False])
def test_a_token_takes_bounded_work_whatever_came_before(
    name: str, kind: str, skips: bool, tokenizer: Callable[[str], Tokenizer]
) -> None:
    counted = copy.copy(tokenizer(name))
    counted._tokenizer = CountingTokenizer(counted._tokenizer)
    counted.__dict__.pop("_vocabulary", None)
    if name in WHOLE_PIECES:
        kinds = {"special": [1], "unknown": [OUTSIDE], "any": [1, 5, OUTSIDE]}
    else:
        kinds = {
            "special": [1],
            "lone bytes": ids_of(tokenizer(name), [b"\x80"]),
            "unknown": [OUTSIDE],
            "bytes of characters": ids_of(tokenizer(name), ["က".encode()]),
            "any": ids_of(tokenizer(name), [1, "ab", b"\x80\xf0\x9f", OUTSIDE, 2, "é"]),
        }
    detokenizer = new(counted)
    params = SamplingParams(skip_special_tokens=skips)
    detokenizer.make_reply(DetokenizeMsg(0, params=params))
    ids = list(itertools.islice(itertools.cycle(kinds.get(kind, [4])), 500))
    for token in ids:
        detokenizer.make_reply(DetokenizeMsg(0, [token]))
    assert counted._tokenizer.num_ids <= 20 * len(ids)


def test_byte_tokens_are_shown_with_the_character_that_they_complete(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    text = "မြန်မာ" * 4
    detokenizer = new(tokenizer("byte fallback"))
    texts = pieces(detokenizer, ids_of(tokenizer("byte fallback"), [text.encode()]))
    assert texts == [part for character in text for part in ("", "", character)]


def test_a_stop_text_of_byte_tokens_is_seen_at_once(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    ids = ids_of(tokenizer("byte fallback"), ["မြန်မာ".encode()])
    detokenizer = new(tokenizer("byte fallback"))
    begin = DetokenizeMsg(0, ids[:8], params=SamplingParams(stop=("န်",)))
    assert detokenizer.make_reply(begin).finish is None
    rest = [detokenizer.make_reply(DetokenizeMsg(0, [token])) for token in ids[8:12]]
    assert [reply.finish for reply in rest] == [None, None, None, "stop"]
    assert "".join(reply.text for reply in rest) == ""


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([], "a"),  # a text begins
        (["ab"], " a"),
        (["ab", 1], "a"),  # a special token that is not shown
        ([b"\n"], " a"),
        ([b"\xe8\xaf"], " a"),  # a broken character of the prompt is no part of the answer
    ],
    ids=str,
)
def test_the_space_between_prompt_and_answer_is_kept(
    context: list[str | bytes | int], expected: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    llama = tokenizer("byte fallback")
    prompt = [token for part in context for token in ids_of(llama, [part])]
    answer = llama._tokenizer.convert_tokens_to_ids(["▁a"])
    reply = new(llama).make_reply(
        DetokenizeMsg(0, answer, finish="length", prompt_tail=prompt[-4:])
    )
    assert reply is not None
    assert reply.text == expected


@pytest.mark.parametrize("name", WHOLE_PIECES)
def test_a_word_after_the_prompt_has_its_space(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    word = 3 if name == "word pieces" else tokenizer(name).encode("a a").tolist()[-1]
    alone = new(tokenizer(name)).make_reply(DetokenizeMsg(0, [word], finish="length"))
    after = new(tokenizer(name)).make_reply(
        DetokenizeMsg(0, [word], finish="length", prompt_tail=[word])
    )
    assert (alone.text[0], after.text) == (alone.text[0].strip(), " " + alone.text)


class CountedText(str):
    """A stop text that counts how often a text is compared with it or with a part of it."""

    num_compared = 0

    def startswith(self, *args: Any) -> bool:
        self.num_compared += 1
        return super().startswith(*args)

    def __getitem__(self, key: Any) -> str:
        self.num_compared += 1
        return super().__getitem__(key)


def test_each_character_is_compared_with_a_stop_text_a_few_times() -> None:
    stops = [CountedText(text) for text in ("a" * 1023 + "b", "ab" * 500, "b" * 1000)]
    search = StopTexts(stops, include=False)
    shown = "".join(search.feed("aaaa") for _ in range(1000))
    assert shown + search.flush() == "a" * 4000
    assert max(stop.num_compared for stop in stops) <= 4 * 4000


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 30)),
    st.booleans(),
)
def test_a_stop_text_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    expected = text
    if ends:
        end, begin, _ = min(ends)
        expected = text[:end] if include else text[:begin]
    search = StopTexts(stops, include=include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    shown = [search.feed(piece) for piece in pieces]
    shown.append(search.flush())
    assert "".join(shown) == expected
    assert search.has_stopped == bool(ends)
