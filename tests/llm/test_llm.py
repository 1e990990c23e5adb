"""Batches without a server; transformers says what they should be."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import reprlib
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.engine import Engine
from minisgl.errors import ConfigError, EngineFailed, InvalidRequest, MiniSGLError, RequestError
from minisgl.llm import LLM, local_rank, portions
from minisgl.llm import llm as llm_module
from minisgl.llm.answers import PartialAnswer, TextReader
from minisgl.llm.interrupts import interrupts_wait
from minisgl.llm.local_rank import LocalRank
from minisgl.llm.rank_group import RankGroup
from minisgl.message import BatchSchedulerMsg, DetokenizeMsg, SchedulerMsg, UserMsg
from minisgl.scheduler.grammars.mask_threads import MaskThreads
from minisgl.utils import hardware
from tests.checkpoints import BOS_ID, CONTEXT, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.system.harness import TIMEOUT_S, wait_until
from tests.utils.test_threads import no_thread

ARCH = "qwen2"
PROMPTS = ["the dog", "The quick brown fox jumps", "語 👍", " and then", "x" * 50]
HELLO = {"role": "user", "content": "hello"}
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def make(folder: Path, **options: Any) -> LLM:
    """A small LLM. With overlap, threads compute the grammar masks, as for a GPU."""
    small = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "num_pages": 256,
        "max_running_requests": 4,
    }
    llm = LLM(folder, **{**small, **options})
    if options.get("overlap") and isinstance(llm._ranks, LocalRank):
        llm._ranks.scheduler.grammars._mask_threads = MaskThreads(2)
    return llm


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(ARCH)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def continuation() -> Callable[[list[int], int], list[int]]:
    """From ids to the greedy ids that follow, by transformers."""
    model = tiny_model(ARCH)

    @torch.inference_mode()
    def follow(prompt: list[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return follow


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text)["input_ids"]
    return ids


def text_of(ids: list[int]) -> str:
    text: str = tiny_tokenizer().decode(ids, skip_special_tokens=True)
    return text


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_texts_are_continued_as_transformers_does_more_of_them_than_there_are_rows(
    llm: LLM, continuation: Callable[..., list[int]]
) -> None:
    outputs = llm.generate(PROMPTS * 2, greedy(12), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [
        continuation(ids_of(prompt), 12) for prompt in PROMPTS
    ] * 2
    for prompt, output in zip(PROMPTS * 2, outputs, strict=True):
        assert output.text == text_of(output.token_ids)
        assert output.finish_reason == "length"
        assert output.num_prompt == len(ids_of(prompt))


def test_ids_are_taken_as_they_are(llm: LLM, continuation: Callable[..., list[int]]) -> None:
    (output,) = llm.generate([7, 8, 9], greedy(8), use_tqdm=False)
    assert output.token_ids == continuation([7, 8, 9], 8)
    assert output.num_prompt == 3
    outputs = llm.generate([[5], (6, 7), "the dog"], greedy(8), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [
        continuation(ids, 8) for ids in ([5], [6, 7], [BOS_ID, *ids_of("the dog")[1:]])
    ]


def test_one_text_is_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate("the dog", greedy(5), use_tqdm=False)
    assert output.token_ids == llm.generate(["the dog"], greedy(5), use_tqdm=False)[0].token_ids


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert list(llm.stream([])) == []
    assert llm.chat([]) == []


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    each = [greedy(n) for n in (1, 7, 3)]
    outputs = llm.generate(PROMPTS[:3], each, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [1, 7, 3]


def test_an_urgent_prompt_overtakes_the_queue(folder: Path) -> None:
    with make(folder, max_running_requests=1) as llm:
        each = [replace(greedy(3), priority=priority) for priority in (0, 2, -1, 0)]
        outputs = llm.stream(PROMPTS[:1] * 4, each)
        ended = [output.index for output in outputs if output.finish_reason]
    assert ended == [2, 0, 3, 1]


@pytest.mark.parametrize("num_params", [0, 1, 3])
def test_another_number_of_parameters_than_prompts_is_refused(llm: LLM, num_params: int) -> None:
    with pytest.raises(InvalidRequest, match=f"2 prompts .* {num_params} sampling_params"):
        llm.generate(PROMPTS[:2], [greedy(3)] * num_params, use_tqdm=False)
    with pytest.raises(InvalidRequest):
        llm.stream(PROMPTS[:2], [greedy(3)] * num_params)


def test_without_parameters_an_answer_ends_at_its_end_or_with_the_context(llm: LLM) -> None:
    (output,) = llm.generate(["the dog"], use_tqdm=False)
    assert output.finish_reason in ("stop", "length")
    assert len(output.token_ids) <= CONTEXT


def test_an_end_of_sequence_token_is_among_the_ids_and_not_in_the_text(llm: LLM) -> None:
    for seed in range(50):
        params = SamplingParams(seed=seed, temperature=3.0, max_tokens=200)
        (output,) = llm.generate(["the dog"], params, use_tqdm=False)
        if output.finish_reason == "stop":
            assert output.text == text_of(output.token_ids[:-1])
            assert output.token_ids[-1] in (1, 3)
            return
    pytest.fail("no answer of 200 random tokens ended by itself")


def test_a_conversation_goes_through_the_template_and_several_do_too(
    llm: LLM, continuation: Callable[..., list[int]]
) -> None:
    turns = [{"role": "user", "content": "hi"}]
    ids = tiny_tokenizer()(
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    expected = continuation(ids["input_ids"], 6)
    (one,) = llm.chat(turns, greedy(6))
    assert one.token_ids == expected
    two = llm.chat([turns, [*turns, *turns]], greedy(6))
    assert two[0].token_ids == expected
    assert len(two) == 2


def test_tools_of_a_conversation_are_part_of_its_prompt(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "fox", "parameters": {"type": "object"}}}
    assert llm.chat(turns, greedy(1))
    with pytest.raises(RequestError, match="maximum context length"):  # descriptions are long
        llm.chat(turns, greedy(1), tools=[tool])


def test_a_stream_is_the_same_answer_piece_by_piece(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, greedy(10), use_tqdm=False)
    texts = [""] * 5
    tokens: list[list[int]] = [[] for _ in range(5)]
    ends = [0] * 5
    for output in llm.stream(PROMPTS, greedy(10)):
        assert not ends[output.index], "an output after the end"
        texts[output.index] += output.text
        tokens[output.index] += output.tokens
        ends[output.index] += output.finish_reason is not None
    assert texts == [output.text for output in whole]
    assert tokens == [output.token_ids for output in whole]
    assert ends == [1] * 5


def test_a_stream_has_all_log_probabilities_that_an_answer_has(llm: LLM) -> None:
    params = [replace(greedy(6), logprobs=1, prompt_logprobs=2), greedy(6)]
    scored, plain = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    outputs = list(llm.stream(PROMPTS[:2], params))
    first, *others = [output for output in outputs if output.index == 0]
    assert first.prompt_logprobs == scored.prompt_logprobs
    assert [output.prompt_logprobs for output in others] == [None] * 5
    logprobs = [entry for output in (first, *others) for entry in output.logprobs or ()]
    assert logprobs == scored.logprobs
    assert plain.logprobs is None
    for output in outputs:
        assert (output.index == 1) == (output.logprobs is None)


def test_a_stream_that_is_closed_gives_everything_back(llm: LLM) -> None:
    for _ in range(6):  # more often than there are rows
        stream = llm.stream(PROMPTS, LONG)
        next(stream)
        stream.close()
        assert llm._ranks.scheduler.is_idle
        llm._ranks.scheduler.check_integrity()
    assert len(llm.generate(PROMPTS, greedy(4), use_tqdm=False)) == 5


def num_posted_by_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, for each step, how many prompts were posted before it."""
    counts: list[int] = []
    step = llm._ranks.step
    receive = llm._ranks.post
    num_posted = 0

    def post(msg: SchedulerMsg) -> None:
        nonlocal num_posted
        num_posted += isinstance(msg, UserMsg)
        receive(msg)

    def count() -> None:
        counts.append(num_posted)
        step()

    monkeypatch.setattr(llm._ranks, "post", post)
    monkeypatch.setattr(llm._ranks, "step", count)
    return counts


def test_garbage_is_collected_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are walked while the device computes, and not before it can begin."""
    states: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        function = getattr(llm._ranks, name)

        def watched(*arguments: Any) -> None:
            states.append((name, gc.isenabled()))
            function(*arguments)

        monkeypatch.setattr(llm._ranks, name, watched)

    watch("post")
    watch("step")
    stream = llm.stream([5, 6], greedy(3))
    next(stream)
    assert gc.isenabled()
    assert ("post", False) in states
    assert ("step", False) in states
    assert not any(is_enabled for _, is_enabled in states)
    stream.close()


def test_the_first_step_does_not_wait_until_all_prompts_are_ready(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[i % 50 + 3] for i in range(300)]
    counts = num_posted_by_step(llm, monkeypatch)
    answers = llm.generate(prompts, greedy(3), use_tqdm=False)
    assert counts[:5] == [32, 160, 288, 300, 300]
    seen: dict[int, list[int]] = {}
    for [first], answer in zip(prompts, answers, strict=True):
        assert seen.setdefault(first, answer.token_ids) == answer.token_ids


def test_answers_have_the_order_of_their_prompts_though_the_last_ones_go_first(llm: LLM) -> None:
    """Four run at a time, and by priority those are the last ones."""
    prompts = [[number + 3] for number in range(8)]
    params = [replace(greedy(2 + number), priority=-number) for number in range(8)]
    begun = dict.fromkeys(output.index for output in llm.stream(prompts, params))
    assert list(begun) != sorted(begun)
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in answers] == list(range(2, 10))


def test_each_prompt_has_log_probabilities_if_its_own_parameters_ask_for_them(llm: LLM) -> None:
    params = [replace(greedy(2), logprobs=logprobs) for logprobs in (None, 0, None, 1)]
    answers = llm.generate([[3], [4], [5], [6]], params, use_tqdm=False)
    assert [answer.logprobs and len(answer.logprobs) for answer in answers] == [None, 2, None, 2]


def test_long_prompts_are_posted_few_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "FIRST_PORTION", portions.Portion(32, num_bytes=96))
    monkeypatch.setattr(portions, "LATER_PORTION", portions.Portion(128, num_bytes=100))
    counts = num_posted_by_step(llm, monkeypatch)
    prompts = [[5] * num_tokens for num_tokens in (12, 12, 12, 12, 30, 1)]
    llm.generate(prompts, greedy(3), use_tqdm=False)
    assert counts[:4] == [2, 5, 6, 6]


@pytest.mark.parametrize("bad", [[VOCAB_SIZE], ["x"]], ids=["by the scheduler", "before"])
def test_a_prompt_that_is_refused_later_ends_the_others(llm: LLM, bad: Any) -> None:
    prompts = [[5]] * 200
    with pytest.raises(RequestError, match="token id"):
        llm.generate([*prompts, bad, *prompts], LONG, use_tqdm=False)
    assert not llm._open
    assert llm._ranks.scheduler.is_idle


def test_prompts_that_wait_to_be_posted_belong_to_their_thread(llm: LLM) -> None:
    """Although all those before them have ended."""
    stream = llm.stream([[5]] * 33, greedy(1))
    for _ in range(32):
        next(stream)
    with ThreadPoolExecutor() as pool, pytest.raises(InvalidRequest, match="another thread"):
        pool.submit(llm.generate, "the dog", greedy(1)).result()
    assert len(list(stream)) == 1
    stream = llm.stream([[5]] * 33, greedy(1))
    next(stream)
    stream.close()
    assert not llm._open


def test_after_prompts_were_posted_in_part_an_llm_can_only_be_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder) as llm:
        with monkeypatch.context() as broken:
            broken.setattr(llm._ranks, "post", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[5]] * 300, LONG, use_tqdm=False)
        with pytest.raises(EngineFailed, match="posted in part"):
            llm.generate("the dog", greedy(1), use_tqdm=False)


def test_an_interrupt_before_prompts_are_posted_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_for = llm._open_for

    def interrupt(*args: Any) -> None:
        open_for(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(llm, "_open_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]] * 300, LONG, use_tqdm=False)
    assert not llm._open


def test_a_stream_that_is_closed_before_a_step_may_end_the_others_of_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector may do it; a step with nothing to do would wait for ever."""
    dropped = llm.stream(PROMPTS, LONG)
    next(dropped)
    post = llm._post

    def post_then_close(*args: Any) -> None:
        post(*args)
        dropped.close()  # type: ignore[attr-defined]
        while llm._open:
            llm._step(lambda: bool(llm._open))

    monkeypatch.setattr(llm, "_post", post_then_close)
    [answer] = llm.generate("the dog", greedy(3), use_tqdm=False)
    assert len(answer.token_ids) == 3


def test_a_stream_that_is_dropped_is_closed(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    del stream
    gc.collect()
    assert llm._ranks.scheduler.is_idle


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "empty"),
        ([VOCAB_SIZE], str(VOCAB_SIZE)),
        ([-1], "-1"),
        ([2**40], "outside|token id"),
        ([5] * CONTEXT, str(CONTEXT)),
    ],
    ids=["empty", "outside", "negative", "huge", "long"],
)
def test_a_refused_prompt_says_why_and_nothing_else_is_lost(
    llm: LLM, prompt: list[int], reason: str
) -> None:
    before = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    with pytest.raises(RequestError, match=reason) as refused:
        llm.generate([PROMPTS[0], prompt, PROMPTS[1]], LONG, use_tqdm=False)
    assert refused.value.__notes__ == ["of prompt 1, from 0"]
    assert llm._ranks.scheduler.is_idle
    llm._ranks.scheduler.check_integrity()
    after = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"ab",
        {"prompt": "a"},
        (text for text in "ab"),
        [None],
        [1.5],
        [5, 6.5],
        [5, "a"],
        ["a", 5],
        [["a"]],
        [[[5]]],
        [[5], 6],
        [[5, [6]]],
        [b"ab"],
        bytearray(b"ab"),
        np.array(5),
        [{"prompt": "a"}],
        [np.array([5.0])],
        np.array([5.0, 6.0]),
        torch.tensor(5),
        torch.tensor([5.0, 6.0]),
        torch.tensor([True, False]),
        torch.tensor([[[5]]]),
        "half of a pair: \ud83d",
    ],
    ids=lambda prompts: "generator" if isinstance(prompts, Iterator) else repr(prompts),
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    for ask in (llm.generate, llm.embed):
        with pytest.raises(InvalidRequest, match=r"prompts must be|token ids|surrogate"):
            ask(prompts)
    assert llm._ranks.scheduler.is_idle


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([7, 8, 9]),
        [np.int64(7), np.int64(8), np.int64(9)],
        range(7, 10),
        torch.tensor([7, 8, 9]),
        torch.tensor([7, 8, 9], dtype=torch.int32),
    ],
    ids=repr,
)
def test_ids_may_be_numpys_or_torchs(llm: LLM, prompt: Any) -> None:
    expected = llm.generate([7, 8, 9], greedy(4), use_tqdm=False)
    for prompts in (prompt, [prompt]):
        assert llm.generate(prompts, greedy(4), use_tqdm=False) == expected


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_rows_of_an_array_are_prompts(llm: LLM, array: Callable[..., Any]) -> None:
    """As transformers' tokenizers return them."""
    rows = [[7, 8, 9], [5, 6, 7]]
    expected = llm.generate(rows, greedy(4), use_tqdm=False)
    assert llm.generate(array(rows), greedy(4), use_tqdm=False) == expected


@pytest.mark.parametrize(
    "params", [[None], {"temperature": 0}, [{"temperature": 0}], "greedy", 5, 0, SamplingParams]
)
def test_what_are_no_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams"):
        llm.generate(["the dog"], params)


@pytest.mark.parametrize(
    "messages",
    [None, "hi", ["hi"], [["hi"]], [None], [5], HELLO, [HELLO, "hi"], [[HELLO], 5]],
    ids=repr,
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a list of dicts"):
        llm.chat(messages)


def test_content_may_come_in_parts_and_a_developer_is_the_system(llm: LLM) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    system = {"role": "system", "content": "be brief"}
    [expected] = llm.chat([system, HELLO], greedy(2))
    [out] = llm.chat(
        [{**system, "role": "developer"}, {"role": "user", "content": parts}], greedy(2)
    )
    assert (out.token_ids, out.num_prompt) == (expected.token_ids, expected.num_prompt)


@pytest.mark.parametrize(
    "content",
    [
        5,
        True,
        {"text": "hi"},
        ["hi"],
        [{"type": "image_url"}],
        [{"text": "hi"}],
        [{"type": "text"}],
    ],
    ids=repr,
)
def test_content_that_is_no_text_is_refused(llm: LLM, content: Any) -> None:
    refusal = f"content must be a text or a list of text parts, got {content!r}"
    with pytest.raises(InvalidRequest, match=re.escape(refusal)) as caught:
        llm.chat([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("role", ["x", "User", None, 5], ids=repr)
def test_a_role_that_the_server_does_not_know_is_refused(llm: LLM, role: Any) -> None:
    refusal = f"role must be one of system, developer, user, assistant, tool, got {role!r}"
    with pytest.raises(InvalidRequest, match=refusal) as caught:
        llm.chat([HELLO, {"role": role, "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "refused",
    [
        [{"role": "x", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": "the " * CONTEXT}],
        [],
    ],
    ids=["role", "content", "surrogate", "long", "empty"],
)
def test_the_error_of_one_of_several_conversations_names_it(llm: LLM, refused: Any) -> None:
    """Whether it is refused as messages, by the template or by the scheduler."""
    with pytest.raises(RequestError) as several:
        llm.chat([[HELLO], refused, [HELLO]], greedy(2))
    assert several.value.__notes__ == ["of prompt 1, from 0"]
    with pytest.raises(RequestError) as one:
        llm.chat([refused], greedy(2))
    assert not hasattr(one.value, "__notes__")


def test_without_proc_there_is_one_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the process's own part of it alone."""
    (tmp_path / "meminfo").write_text(Path("/proc/meminfo").read_text())
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    with pytest.raises(ConfigError, match="/proc must be mounted and readable: "):
        make(folder)


def test_no_tools_may_be_none(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    [expected] = llm.chat(turns, greedy(2))
    [out] = llm.chat(turns, greedy(2), tools=None)
    assert out.token_ids == expected.token_ids


@pytest.mark.parametrize("tools", [{"type": "function"}, "x", [5], 5, b"x", [[]]], ids=repr)
def test_what_are_no_tools_is_refused(llm: LLM, tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools must be a sequence of dicts, got") as refusal:
        llm.chat([{"role": "user", "content": "hi"}], tools=tools)
    assert refusal.value.param == "tools"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


NO_JSON = [{1, 2}, b"x", math.nan, np.float32(1), {1: 2}, {(1, 2): 3}, "\ud800", int]


@pytest.mark.parametrize("value", NO_JSON, ids=reprlib.repr)
def test_what_is_no_json_in_a_tool_is_named_with_the_tool_and_its_place(
    llm: LLM, value: Any
) -> None:
    """Not by a place in the prompt, which the caller has not written."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1, value]}}}
    tool = {"type": "function", "function": {"name": "fox", "parameters": parameters}}
    with pytest.raises(InvalidRequest) as refusal:
        llm.chat([HELLO], tools=[tool])
    assert refusal.value.param == "tools"
    place = "function.parameters.properties.a.enum.1"
    assert str(refusal.value).startswith("the tool 'fox' must be JSON, ")
    assert str(refusal.value).endswith(f", got {reprlib.repr(value)} at {place}")


@pytest.mark.parametrize("value", NO_JSON, ids=reprlib.repr)
def test_what_is_no_json_in_a_call_is_named_with_its_place(llm: LLM, value: Any) -> None:
    call = {"type": "function", "function": {"name": "fox", "arguments": {"a": value}}}
    with pytest.raises(InvalidRequest) as refusal:
        llm.chat([HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert refusal.value.param == "messages"
    assert str(refusal.value).startswith("tool_calls must be JSON, ")
    place = "0.function.arguments.a"
    assert str(refusal.value).endswith(f", got {reprlib.repr(value)} at {place}")


def test_a_tool_or_calls_that_are_no_json_at_all_have_no_place(llm: LLM) -> None:
    tools: Any = [{1: 2}]
    with pytest.raises(InvalidRequest, match=r"^tool 0 must be JSON, .*, got \{1: 2\}$"):
        llm.chat([HELLO], tools=tools)
    with pytest.raises(InvalidRequest, match=r"^tool_calls must be JSON, .*, got \{1, 2\}$"):
        llm.chat([HELLO, {"role": "assistant", "tool_calls": {1, 2}}])


def test_a_field_of_a_message_that_no_template_reads_may_be_anything(llm: LLM) -> None:
    assert llm.chat([{**HELLO, "sent_at": {1, 2}}], greedy(1))


@pytest.mark.parametrize("depth", [65, 5000])
def test_a_tool_that_is_nested_too_deeply_is_refused(llm: LLM, depth: int) -> None:
    with pytest.raises(InvalidRequest, match="tool 0 is nested more than 64 deep") as refusal:
        llm.chat([HELLO], tools=[nested(depth)])
    assert refusal.value.param == "tools"


def test_a_tool_that_contains_itself_is_refused(llm: LLM) -> None:
    tool: dict[str, Any] = {"function": {"name": "fox"}}
    tool["function"]["parameters"] = tool
    with pytest.raises(InvalidRequest, match="the tool 'fox' is nested more than 64 deep"):
        llm.chat([HELLO], tools=[tool])


def test_a_number_of_too_many_digits_in_a_tool_is_refused(llm: LLM) -> None:
    """Python does not write it out."""
    with pytest.raises(InvalidRequest, match="got an integer of 16610 bits at a"):
        llm.chat([HELLO], tools=[{"a": 10**5000}])


def test_half_a_surrogate_pair_in_a_conversation_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dropped_stream_may_be_collected_in_a_step(
    folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of another call: no step runs within a step."""

    def drop_a_stream(llm: LLM) -> None:
        stream = llm.stream(PROMPTS[:3], LONG)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)

    with make(folder, overlap=overlap) as llm:
        assert isinstance(llm._ranks, LocalRank)
        expected = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        sample = llm._ranks.scheduler._sample
        monkeypatch.setattr(
            llm._ranks.scheduler, "_sample", lambda step: (gc.collect(0), sample(step))
        )
        gc.disable()
        try:
            drop_a_stream(llm)
            answers = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        finally:
            gc.enable()
        assert [out.token_ids for out in answers] == [out.token_ids for out in expected]
        llm.generate("the dog", greedy(1), use_tqdm=False)
        assert not llm._open
        llm._ranks.scheduler.check_integrity()


def test_an_interrupt_between_two_steps_aborts_although_its_trace_is_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(PartialAnswer, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as kept:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert not llm._open
    assert kept.tb


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Programs that run in the background may ignore SIGINT. An alarm raises, too."""
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGALRM: signal.signal(signal.SIGALRM, raise_timeout),
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def raise_timeout(*_: object) -> None:
    raise TimeoutError("the call takes too long")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeoutError)],
    ids=["Ctrl-C", "an alarm"],
)
def test_an_interrupt_in_a_step_waits_for_its_end_and_aborts(
    folder: Path,
    number: signal.Signals,
    error: type[BaseException],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make(folder, overlap=overlap) as llm:
        assert isinstance(llm._ranks, LocalRank)
        expected = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        scheduler = llm._ranks.scheduler
        sample = scheduler._sample
        signals = [number]  # one, in the first step

        def sample_interrupted(step: Any) -> None:
            if signals:
                signal.raise_signal(signals.pop())
            sample(step)

        with monkeypatch.context() as interrupted:
            interrupted.setattr(scheduler, "_sample", sample_interrupted)
            with pytest.raises(error):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert not llm._open
        again = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [out.token_ids for out in again] == [out.token_ids for out in expected]
        scheduler.check_integrity()


@pytest.mark.parametrize("num_prompts", [1, 300])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_prompts_are_queued_leaves_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    prompts = ["the dog"] * num_prompts
    post = llm._ranks.post
    with monkeypatch.context() as interrupted:

        def post_interrupted(msg: SchedulerMsg) -> None:
            signal.raise_signal(signal.SIGINT)
            interrupted.undo()
            post(msg)

        interrupted.setattr(llm._ranks, "post", post_interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, LONG, use_tqdm=False)
    assert not llm._open
    assert llm._ranks.scheduler.is_idle
    assert len(llm.generate(prompts, greedy(1), use_tqdm=False)) == num_prompts


def test_an_interrupt_just_before_interrupts_wait_leaves_no_prompts_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = llm._run(["the dog"] * 300, [LONG] * 300, wants_text=False)
    next(outputs)
    interrupts = [KeyboardInterrupt()]

    def wait_interrupted() -> AbstractContextManager[None]:
        if interrupts:
            raise interrupts.pop()
        return interrupts_wait()

    with monkeypatch.context() as interrupted:
        interrupted.setattr(llm_module, "interrupts_wait", wait_interrupted)
        with pytest.raises(KeyboardInterrupt):
            outputs.close()
    assert not llm._open
    assert isinstance(llm._ranks, LocalRank)
    assert llm._ranks.scheduler.is_idle


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_breaks_the_step_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_twice(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with make(folder) as llm:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(llm._ranks.scheduler, "_sample", interrupt_twice)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        with pytest.raises(EngineFailed, match="broken off"):
            llm.generate(PROMPTS, greedy(3), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGALRM) is raise_timeout


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_breaks_the_end_of_aborted_prompts_off_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder) as llm:
        step = llm._ranks.step
        num_signals = [1, 2]  # in a step, and in the one that ends the aborted prompts

        def step_interrupted() -> None:
            for _ in range(num_signals.pop(0)):
                signal.raise_signal(signal.SIGINT)
            step()

        with monkeypatch.context() as interrupted:
            interrupted.setattr(llm._ranks, "step", step_interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert not num_signals
        with pytest.raises(EngineFailed, match="broken off"):
            llm.generate(PROMPTS, greedy(3), use_tqdm=False)


def test_a_fork_is_told_that_it_has_no_engine(llm: LLM) -> None:
    """The engine's threads are not in a fork, which would wait for them without end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            llm.close()
            llm.generate("the dog", greedy(1), use_tqdm=False)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reader, 1000).decode()
    assert (
        said == f"EngineFailed: this LLM belongs to the process {os.getpid()}, this is a fork of it"
    )
    os.close(reader)
    os.close(writer)
    assert llm.generate("the dog", greedy(1), use_tqdm=False)


def said_in_a_fork(do: Callable[[], object]) -> str:
    """The error that a fork meets, or "nothing"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        said = "nothing"
        try:
            do()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_an_llm_made_in_a_fork_is_refused(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a pool of processes: torch would wait without end for threads of the parent."""
    llm.generate("the dog", greedy(1), use_tqdm=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    said = said_in_a_fork(lambda: make(folder).close())
    assert said.startswith(f"EngineFailed: this is a fork of the process {os.getpid()}, ")


@pytest.mark.usefixtures("llm")
def test_where_torch_has_no_threads_an_llm_can_be_made_in_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert said_in_a_fork(local_rank._check_can_compute) == "nothing"


def test_a_refused_conversation_says_why(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        llm.chat([{"role": "user"}])


def test_tokens_after_a_stop_text_are_cut_from_their_output(llm: LLM) -> None:
    reader = TextReader(llm._tokenizer.make_detokenizer())
    ids = ids_of("0 1 2 3 4")[-5:]
    texts = [llm._tokenizer.decode([token]) for token in ids]
    entries = [TokenLogprobs(-float(place), []) for place in range(5)]
    params = SamplingParams(stop=(texts[2] + texts[3],))
    first = DetokenizeMsg(7, ids[:2], entries[:2], params)
    second = DetokenizeMsg(7, ids[2:], entries[2:], finish="length")
    assert reader.read(first) == (first, texts[0] + texts[1])
    cut, text = reader.read(second)
    assert text == ""
    assert cut.tokens == ids[2:4]
    assert cut.logprobs == entries[2:4]
    assert cut.finish == "stop"


def test_generating_while_a_stream_is_open_mixes_nothing_up(llm: LLM) -> None:
    alone = [output.token_ids for output in llm.generate(PROMPTS[:2], greedy(10), use_tqdm=False)]
    streamed: list[int] = []
    for number, output in enumerate(llm.stream(PROMPTS[0], greedy(10))):
        streamed += output.tokens
        if number == 2:
            (other,) = llm.generate(PROMPTS[1], greedy(10), use_tqdm=False)
    assert [streamed, other.token_ids] == alone


def test_two_streams_can_be_read_in_turns(llm: LLM) -> None:
    alone = [output.token_ids for output in llm.generate(PROMPTS[:2], greedy(10), use_tqdm=False)]
    streams = [llm.stream(prompt, greedy(10)) for prompt in PROMPTS[:2]]
    tokens: list[list[int]] = [[], []]
    for outputs in zip(*streams, strict=True):
        for index, output in enumerate(outputs):
            tokens[index] += output.tokens
    assert tokens == alone


def test_a_seeded_answer_does_not_depend_on_its_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    beside = llm.generate(PROMPTS, [params, *[greedy(10)] * 4], use_tqdm=False)
    assert beside[0].token_ids == alone.token_ids


def test_a_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(2))
    assert "5/5" in capsys.readouterr().err
    llm.generate(PROMPTS, greedy(2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_it_can_be_closed_twice_and_then_no_more_be_used(folder: Path) -> None:
    llm = make(folder)
    llm.close()
    llm.close()
    with pytest.raises(MiniSGLError):
        llm.generate("the dog", greedy(3), use_tqdm=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_llm_holds_no_memory_of_the_device(folder: Path, overlap: bool) -> None:
    """Its variable often lives on, and the next one in the process would find little left."""
    with make(folder, overlap=overlap) as llm:
        next(llm.stream(PROMPTS, LONG))
        assert isinstance(llm._ranks, LocalRank)
        engine = llm._ranks.scheduler._executor
        assert isinstance(engine, Engine)
        context = engine.context
        held = [engine._model, context.kv_pool, context.token_pool_RL, context.attn_backend]
        references = [weakref.ref(each) for each in held]
        del engine, context, held
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert not llm._ranks.is_running


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_a_full_collection_does_not_walk_what_was_imported(folder: Path, *, closes: bool) -> None:
    """It would take 0.1 s, in which a GPU has nothing to do, at every second batch."""
    gc.unfreeze()
    try:
        llm = make(folder)
        assert not is_walked(vars(torch))
        if closes:
            llm.close()
        del llm
        assert is_walked(vars(torch))
    finally:
        gc.freeze()


def is_walked(container: dict[str, Any]) -> bool:
    return any(each is container for each in gc.get_objects())


def test_a_stream_that_is_still_open_when_its_llm_closes_ends_quietly(folder: Path) -> None:
    with make(folder) as llm:
        stream = llm.stream(PROMPTS, LONG)
        next(stream)
    stream.close()


def test_the_context_manager_lets_errors_through(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), make(folder):
        _ = 1 / 0


def test_two_of_them_live_side_by_side(
    folder: Path, checkpoint: Callable[[str], Path], llm: LLM
) -> None:
    first = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    with make(checkpoint("llama")) as other, make(folder) as twin:
        different = other.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [o.token_ids for o in twin.generate(PROMPTS, greedy(6), use_tqdm=False)] == [
            o.token_ids for o in first
        ]
        assert [o.token_ids for o in llm.generate(PROMPTS, greedy(6), use_tqdm=False)] == [
            o.token_ids for o in first
        ]
    assert [o.token_ids for o in different] != [o.token_ids for o in first]
    assert [o.token_ids for o in llm.generate(PROMPTS, greedy(6), use_tqdm=False)] == [
        o.token_ids for o in first
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 0}, "--tp"),
        ({"page_size": 0}, "--page-size"),
        ({"cache": "lru"}, "lru"),
        ({"dtype": "int4"}, "--dtype"),
        ({"max_seq_len": CONTEXT + 1}, "--max-seq-len"),
        ({"num_pages": 2**29}, "--num-pages must be <= 536854528 with pages of 4 tokens"),
        ({"tp": "2"}, "--tp must be of the type int, got '2'"),
        ({"page_size": 4.5}, "--page-size"),
        ({"cache": None}, "--cache"),
        ({"attn": ["torch"]}, "--attn"),
        ({"overlap": "no"}, "--overlap"),
        ({"seed": "x"}, "--seed"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make(folder, **options)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "LLM has no option nope$"),
        ("max_seq_length", r"LLM has no option max_seq_length; did you mean max_seq_len\?"),
        ("tensor_parallel", "LLM has no option tensor_parallel$"),
        ("port", "LLM has no option port$"),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_the_closest(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("/nowhere/at/all", **{name: 1})


def test_a_model_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        LLM("/nowhere/at/all")


@pytest.mark.slow
def test_two_ranks_say_what_one_does_and_leave_nothing(
    folder: Path, llm: LLM, tmp_path: Path
) -> None:
    alone = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    before = children()
    with make(folder, tp=2, overlap=True) as pair:
        ranks = multiprocessing.active_children()
        assert len(ranks) == 2
        together = pair.generate(PROMPTS, greedy(12), use_tqdm=False)
        stream = pair.stream(PROMPTS, LONG)
        next(stream)
        stream.close()
        assert not pair._open
        with pytest.raises(RequestError):
            pair.generate([PROMPTS[0], []], LONG, use_tqdm=False)
        again = pair.generate(PROMPTS, greedy(12), use_tqdm=False)
        with pytest.MonkeyPatch.context() as patch:
            assert_sends_without_waiting(pair, patch)
            many = pair.generate([[5]] * 300, greedy(3), use_tqdm=False)
        unfinished = pair.stream(PROMPTS, LONG)
        next(unfinished)
    unfinished.close()
    expected = [output.token_ids for output in alone]
    assert (
        [output.token_ids for output in together]
        == [output.token_ids for output in again]
        == expected
    )
    assert [output.token_ids for output in many] == [many[0].token_ids] * 300
    assert not any(rank.is_alive() for rank in ranks)
    left = [
        child
        for child in children() - before
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert left == []


def assert_sends_without_waiting(pair: LLM, patch: pytest.MonkeyPatch) -> None:
    """From now on; what waits meanwhile could be made ready for the ranks."""
    ranks = pair._ranks
    assert isinstance(ranks, RankGroup)
    step = ranks.step
    put = ranks._inbox.put
    wait = ranks._outputs.wait
    sent: list[BatchSchedulerMsg] = []

    def wait_after_nothing_sent(*descriptors: int) -> bool:
        assert not sent
        return wait(*descriptors)

    def start_step() -> None:
        sent.clear()
        step()

    patch.setattr(ranks._inbox, "put", lambda msg: (sent.append(msg), put(msg)))
    patch.setattr(ranks._outputs, "wait", wait_after_nothing_sent)
    patch.setattr(ranks, "step", start_step)


def child(name: str) -> BaseProcess:
    """A process that this one has started, or is about to start."""

    def find() -> list[BaseProcess]:
        return [each for each in multiprocessing.active_children() if each.name == name]

    return wait_until(find, f"{name} starts")[0]


def assert_all_end() -> None:
    for process in multiprocessing.active_children():
        process.join(TIMEOUT_S)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_rank_that_dies_in_a_step_is_an_error_and_ends_the_others(folder: Path) -> None:
    """Rank 1 has stopped, so rank 0 is in a collective or comes to one."""
    with make(folder, tp=2) as pair, ThreadPoolExecutor() as pool:
        os.kill(child("scheduler-1").pid, signal.SIGSTOP)
        answers = pool.submit(pair.generate, PROMPTS, LONG, use_tqdm=False)
        os.kill(child("scheduler-1").pid, signal.SIGKILL)
        message = r"scheduler-1 died with exit code -9 \(SIGKILL\)"
        with pytest.raises(EngineFailed, match=message):
            answers.result(TIMEOUT_S)
        assert_all_end()
        with pytest.raises(EngineFailed, match=message):
            pair.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.slow
def test_a_rank_that_dies_between_two_calls_ends_the_others(folder: Path) -> None:
    with make(folder, tp=2) as pair:
        child("scheduler-0").kill()
        assert_all_end()
        with pytest.raises(EngineFailed, match="scheduler-0 died with exit code -9"):
            pair.generate(PROMPTS, greedy(12), use_tqdm=False)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_starts_is_an_error(folder: Path) -> None:
    with ThreadPoolExecutor() as pool:
        pair = pool.submit(make, folder, tp=2)
        child("scheduler-1").kill()
        with pytest.raises(EngineFailed, match="scheduler-1 died with exit code -9"):
            pair.result(TIMEOUT_S)
    assert_all_end()


def test_without_threads_an_llm_of_several_ranks_says_so_and_starts_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Thread, "start", no_thread)
    with pytest.raises(EngineFailed, match="the system starts no more threads; see ulimit -u"):
        make(folder, tp=2)
    assert multiprocessing.active_children() == []


def test_a_second_thread_is_told_so_and_the_first_goes_on(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPTS, greedy(5), use_tqdm=False)
    is_stepping = Event()
    may_go_on = Event()
    with make(folder) as busy, ThreadPoolExecutor(1) as pool:
        step = busy._ranks.step

        def step_slowly() -> None:
            is_stepping.set()
            assert may_go_on.wait(TIMEOUT_S)
            step()

        monkeypatch.setattr(busy._ranks, "step", step_slowly)
        first = pool.submit(busy.generate, PROMPTS, greedy(5), use_tqdm=False)
        assert is_stepping.wait(TIMEOUT_S)
        for use in (lambda: busy.generate("the dog", greedy(5), use_tqdm=False), busy.close):
            with pytest.raises(InvalidRequest, match="another thread"):
                use()
        may_go_on.set()
        answers = first.result(TIMEOUT_S)
        assert [out.token_ids for out in answers] == [out.token_ids for out in expected]
        again = busy.generate(PROMPTS, greedy(5), use_tqdm=False)
        assert [out.token_ids for out in again] == [out.token_ids for out in expected]


def test_a_thread_has_an_llm_until_its_answers_have_ended(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, greedy(5))
    first = next(stream)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llm.generate, "the dog", greedy(5), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="another thread"):
            other.result(TIMEOUT_S)
        tokens = [token for output in (first, *stream) for token in output.tokens]
        assert len(tokens) == 5 * len(PROMPTS)
        later = pool.submit(llm.generate, "the dog", greedy(5), use_tqdm=False)
        assert len(later.result(TIMEOUT_S)[0].token_ids) == 5


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_after_a_step_that_broke_nothing_is_taken_any_more(
    folder: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder) as llm:
        with monkeypatch.context() as broken:
            broken.setattr(llm._ranks.scheduler, "_sample", lambda _: (_ for _ in ()).throw(error))
            with pytest.raises(error):
                llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        with pytest.raises(EngineFailed, match="broken off"):
            llm.generate(PROMPTS, greedy(3), use_tqdm=False)


def test_a_step_that_broke_while_it_ended_requests_holds_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step meets what is half done, as an answer that has ended already."""
    with make(folder, overlap=True) as llm:
        assert isinstance(llm._ranks, LocalRank)
        engine = llm._ranks.scheduler._executor
        assert isinstance(engine, Engine)
        pool = weakref.ref(engine.context.kv_pool)
        del engine
        with monkeypatch.context() as broken:
            requests = llm._ranks.scheduler.requests
            broken.setattr(requests, "leave_step", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, greedy(1), use_tqdm=False)
    gc.collect()
    assert pool() is None


def test_without_a_tokenizer_ids_go_in_and_come_out(folder: Path, llm: LLM) -> None:
    with make(folder, skip_tokenizer_init=True) as bare:
        [expected], [answer] = (
            each.generate([ids_of("the dog")], greedy(5), use_tqdm=False) for each in (llm, bare)
        )
        assert (answer.token_ids, answer.text) == (expected.token_ids, "")
        outputs = list(bare.stream([ids_of("the dog")], greedy(5)))
        assert [token for output in outputs for token in output.tokens] == expected.token_ids
        assert {output.text for output in outputs} == {""}
        assert outputs[-1].finish_reason == "length"
        with pytest.raises(InvalidRequest, match="prompts must be token ids"):
            bare.generate(["the dog"], greedy(5), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="there can be no stop texts"):
            bare.generate([ids_of("the dog")], SamplingParams(stop=("x",)), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="prompts must be token ids"):
            bare.chat([{"role": "user", "content": "hello"}], greedy(5))


def test_a_config_is_enough_for_random_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with make(tmp_path, skip_tokenizer_init=True, dummy_weight=True) as llm:
        [answer] = llm.generate([[5, 6, 7]], greedy(9), use_tqdm=False)
        assert len(answer.token_ids) == 9
        assert all(0 <= token < VOCAB_SIZE for token in answer.token_ids)
