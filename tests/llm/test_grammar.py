"""Structured outputs: transformers gives the logits, Python's own parsers judge the answers."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits
from torch import Tensor

from minisgl.core import Grammar, SamplingParams
from minisgl.engine import SampledStep
from minisgl.errors import EngineFailed, RequestError
from minisgl.grammar import compiler
from minisgl.llm import LLM
from minisgl.llm.local_rank import LocalRank
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.scheduler.grammars.budget import GrammarBudget
from tests.checkpoints import EOS_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tests.llm.test_llm import ARCH, ids_of, make
from tests.llm.test_parameters import ENGINES

PROMPT = "The quick brown fox jumps"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["fox", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def other_work_takes_no_precedence() -> Iterator[None]:
    """On a loaded machine a trial of a grammar would not be brought to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minisgl.grammar.trials._NICENESS", 1)
        yield


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with make(checkpoint(ARCH), **request.param) as llm:
        yield llm
        assert not llm._ranks.scheduler.grammars._matches, "a finished request left its matcher"


@pytest.fixture(scope="module")
def ranks(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    """Two ranks, which take seconds to start. The last test of this file ends them."""
    with make(checkpoint(ARCH), tp=2, overlap=True) as llm:
        yield llm


def params(kind: str, text: str, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 60, "temperature": 0.0, "grammar": Grammar(kind, text), **fields}
    )  # type: ignore[arg-type]


def json_params(schema: dict[str, Any], **fields: Any) -> SamplingParams:
    return params(
        "json_schema", json.dumps(schema), **{"max_tokens": 150, "temperature": 1.0, **fields}
    )


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 6
    assert isinstance(person["age"], int)
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"fox", "dog"}
    assert len(person["tags"]) <= 3
    return True


def test_a_forced_text_may_spell_a_special_token(llm: LLM) -> None:
    text = "Usage: cp <|im_end|> </s>"
    [answer] = llm.generate(PROMPT, params("regex", re.escape(text)), use_tqdm=False)
    assert (answer.text, answer.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "fields", [{}, {"presence_penalty": 2.0, "logit_bias": {7: 3.0}}], ids=["plain", "changed"]
)
def test_the_best_of_what_the_grammar_allows_is_chosen(llm: LLM, fields: dict[str, Any]) -> None:
    """A grammar for which Python finds the allowed tokens by itself."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(ARCH)
    pieces = {token: tokenizer.decode([token]) for token in range(4, VOCAB_SIZE - 1)}
    text = ""
    expected: list[int] = []
    while len(text) < 12:
        with torch.no_grad():
            logits_V: Tensor = (
                model(torch.tensor([ids_of(PROMPT) + expected])).logits[0, -1].float()
            )
        for token, bias in fields.get("logit_bias", {}).items():
            logits_V[token] += bias
        for token in set(expected):
            logits_V[token] -= fields.get("presence_penalty", 0)
        allowed = [t for t, piece in pieces.items() if re.fullmatch("[a-z ]{1,12}", text + piece)]
        expected.append(max(allowed, key=lambda token: float(logits_V[token])))
        text += pieces[expected[-1]]
    [out] = llm.generate(PROMPT, params("regex", "[a-z ]{12}", **fields), use_tqdm=False)
    assert (out.token_ids, out.text, out.finish_reason) == (expected, text, "stop")


def test_random_answers_match_their_schema(llm: LLM) -> None:
    each = [json_params(PERSON, seed=seed) for seed in range(24)]
    outs = llm.generate([PROMPT] * len(each), each, use_tqdm=False)
    assert [out.finish_reason for out in outs] == ["stop"] * len(each)
    assert all(is_person(out.text) for out in outs)
    assert len({out.text for out in outs}) > 12


def test_a_stream_gives_the_same(llm: LLM) -> None:
    each = [json_params(PERSON, seed=seed) for seed in range(4)]
    streamed = [""] * 4
    finishes: list[str] = []
    for output in llm.stream([PROMPT] * 4, each):
        streamed[output.index] += output.text
        if output.finish_reason:
            finishes.append(output.finish_reason)
    assert streamed == [out.text for out in llm.generate([PROMPT] * 4, each, use_tqdm=False)]
    assert finishes == ["stop"] * 4


def test_neighbours_answer_as_if_alone(llm: LLM) -> None:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        json_params(PERSON, seed=3),
        SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, top_p=0.9),
        params("regex", "[a-z ]{5,30}", temperature=1.0, seed=8, frequency_penalty=0.5),
        params(
            "lark", 'start: "<" name ">"\nname: /[a-z]+/', temperature=1.0, seed=1, max_tokens=30
        ),
    ]
    alone = [llm.generate(PROMPT, kind, use_tqdm=False)[0] for kind in kinds]
    crowd = llm.generate([PROMPT] * len(kinds), kinds, use_tqdm=False)
    assert [out.token_ids for out in crowd] == [out.token_ids for out in alone]
    assert re.fullmatch("[a-z ]{5,30}", alone[3].text)
    if alone[4].finish_reason == "stop":
        assert re.fullmatch("<[a-z]+>", alone[4].text)
    else:
        assert re.fullmatch("<[a-z]*", alone[4].text)


@pytest.mark.parametrize(
    ("text", "fields", "finish", "match"),
    [
        ("[a-c]{9}", {"max_tokens": 4}, "length", "[a-c]{4}"),
        ("[a-c]{9}", {"max_tokens": 9}, "stop", "[a-c]{9}"),
        ("[a-c]{3}", {"min_tokens": 20, "ignore_eos": True}, "stop", "[a-c]{3}"),
        ("[a-c]+", {"logit_bias": {EOS_ID: 100}}, "stop", "[a-c]"),
        ("[a-c]+", {"logit_bias": {EOS_ID: 100}, "ignore_eos": True}, "stop", "[a-c]"),
        (
            "[a-c]+",
            {"logit_bias": {EOS_ID: 100}, "ignore_eos": True, "min_tokens": 4},
            "stop",
            "[a-c]{4}",
        ),
        ("[a-c]*", {"logit_bias": {EOS_ID: 100}}, "stop", ""),
        (
            "[a-c]+",
            {"logit_bias": {EOS_ID: 100}, "ignore_eos": True, "skip_special_tokens": False},
            "stop",
            "[a-c]",
        ),
        ("", {"min_tokens": 3, "top_p": 0.9}, "stop", ""),
        (
            "[a-c]{3}|[a-c]{3} end",
            {"stop": (" e",), "logit_bias": {EOS_ID: -100}},
            "stop",
            "[a-c]{3}",
        ),
    ],
)
def test_an_answer_ends_with_its_match_or_before(
    llm: LLM, text: str, fields: dict[str, Any], finish: str, match: str
) -> None:
    [out] = llm.generate(PROMPT, params("regex", text, **fields), use_tqdm=False)
    assert out.finish_reason == finish
    assert re.fullmatch(match, out.text)


def test_log_probabilities_are_those_before_the_mask(llm: LLM) -> None:
    [plain] = llm.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=3), use_tqdm=False
    )
    [guided] = llm.generate(PROMPT, params("regex", "[0-9]", logprobs=3), use_tqdm=False)
    assert plain.logprobs
    assert guided.logprobs
    assert [token for token, _ in guided.logprobs[0].top] == [
        token for token, _ in plain.logprobs[0].top
    ]
    assert guided.logprobs[0].logprob < plain.logprobs[0].top[0][1]
    assert guided.text.isdigit()


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "animal"}', "Invalid type: animal"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", "{", "EOF while parsing"),
        ("json_schema", "[1]", "the grammar is refused"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x.json"}', "retrieving it failed"),
        ("json_schema", '{"$ref": "#"}', "nothing matches"),
        ("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000, "recursion limit"),
        ("regex", "[0-9", "unclosed character class"),
        ("regex", "(" * 10000, "invalid regex"),
        ("regex", "a(?=b)", "look-around"),
        ("lark", "", "Empty grammar"),
        ("lark", "start: " + "(" * 10000 + '"a"' + ")" * 10000, "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(
    llm: LLM, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as refusal:
        llm.generate([PROMPT, PROMPT], [params("regex", "yes"), params(kind, text)], use_tqdm=False)
    assert refusal.value.param == "grammar"
    assert llm.generate(PROMPT, params("regex", "yes"), use_tqdm=False)[0].text == "yes"


CHAIN = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(3500)} | {"r3500": {"enum": ["yes"]}}


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("json_schema", json.dumps({"$defs": CHAIN, "$ref": "#/$defs/r0"}), '"yes"'),
        (
            "lark",
            "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(7000)) + 'r7000: "yes"',
            "yes",
        ),
    ],
    ids=["references", "rules"],
)
def test_a_grammar_of_thousands_of_links_is_followed(
    llm: LLM, kind: str, text: str, answer: str
) -> None:
    """By recursion, which once overflowed the stack of the process."""
    assert len(text) < MAX_GRAMMAR
    [out] = llm.generate(PROMPT, params(kind, text), use_tqdm=False)
    assert out.text == answer


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a?" * 60_000),
        ("json_schema", json.dumps({"type": "string", "pattern": "^" + "a?" * 60_000 + "$"})),
    ],
    ids=["regex", "pattern"],
)
def test_what_would_take_long_to_compile_is_refused(llm: LLM, kind: str, text: str) -> None:
    with pytest.raises(RequestError, match="too big") as refusal:
        llm.generate(PROMPT, params(kind, text), use_tqdm=False)
    assert "limits." not in str(refusal.value)


BOMB = {"allOf": [{"type": "string", "pattern": f"^(.*[a-f]){{{k}}}.*$"} for k in range(1, 40)]}


def test_a_grammar_that_takes_minutes_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="more than 1 s to compile") as refusal:
        llm.generate(PROMPT, json_params(BOMB), use_tqdm=False)
    assert refusal.value.param == "grammar"
    assert llm.generate(PROMPT, params("regex", "yes"), use_tqdm=False)[0].text == "yes"


def test_a_refusal_quotes_nothing_but_the_mistake(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    schema = json.dumps({"type": "object", "properties": {"secret": {"type": "animal"}}})
    for text in (
        f"start: %json {schema}",
        f'start: "secret" other\nother: %json {schema}',
        "start: secret",
    ):
        with pytest.raises(RequestError, match=r"animal|unknown name") as refusal:
            llm.generate(PROMPT, params("lark", text), use_tqdm=False)
        assert "|" not in str(refusal.value)
        assert "other" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_requests_that_lose_their_pages_keep_their_place_in_the_match(
    checkpoint: Callable[[str], Path],
) -> None:
    each = [json_params(PERSON, seed=seed) for seed in range(8)]
    answers = []
    for num_pages in (256, 45):
        with make(
            checkpoint(ARCH), max_running_requests=8, num_pages=num_pages, overlap=True
        ) as llm:
            answers.append(
                [out.token_ids for out in llm.generate([PROMPT] * 8, each, use_tqdm=False)]
            )
            retractions = llm._ranks.scheduler.statistics.counts.num_retractions
    assert retractions > 0
    assert answers[0] == answers[1]


def test_all_ranks_follow_the_grammar(checkpoint: Callable[[str], Path], ranks: LLM) -> None:
    each = [json_params(PERSON, seed=seed) for seed in range(3)] + [
        SamplingParams(max_tokens=9, temperature=0.0)
    ]
    answers = []
    with make(checkpoint(ARCH), overlap=True) as alone:
        for llm in (alone, ranks):
            answers.append([out.text for out in llm.generate([PROMPT] * 4, each, use_tqdm=False)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 40}], ids=["plain", "long"])
def test_a_grammar_that_grows_too_large_ends_the_answer_on_all_ranks(
    checkpoint: Callable[[str], Path], ranks: LLM, fields: dict[str, Any]
) -> None:
    """A mask finds it. The next answers meet it earlier, since they share the automaton."""
    patterns = [{"type": "string", "pattern": f"^.{{0,{k}}}a$"} for k in range(400)]
    many = json.dumps({"title": str(fields), "anyOf": patterns})  # an automaton for each case
    with make(checkpoint(ARCH), overlap=True) as alone:
        for llm in (alone, ranks):
            for _ in range(3):
                with pytest.raises(RequestError, match="too many expressions"):
                    llm.generate(
                        PROMPT,
                        params("json_schema", many, logit_bias={EOS_ID: -100}, **fields),
                        use_tqdm=False,
                    )
                assert llm.generate(PROMPT, params("regex", "yes"), use_tqdm=False)[0].text == "yes"


def test_a_grammar_that_has_grown_too_large_is_compiled_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers share an automaton. Where one may have no more states, the next begin anew."""
    limits = LLParserLimits(max_lexer_states=500)
    monkeypatch.setitem(compiler._LIMITS, "regex", limits)
    regex = "(a|b)*a(a|b){16}c"

    def answer(seed: int) -> str:
        asked = params("regex", regex, temperature=1.0, seed=seed, max_tokens=200)
        [out] = llm.generate([PROMPT], [asked], use_tqdm=False)
        return out.text if out.finish_reason == "stop" else ""

    with make(checkpoint(ARCH)) as llm:
        with pytest.raises(RequestError, match="too many states"):
            for seed in range(1000):
                answer(seed)
        texts = [answer(seed) for seed in range(3)]
    assert any(texts)
    assert all(re.fullmatch(regex, text) for text in texts if text)


def exceed_the_budget(folder: Path) -> None:
    regex = "(a|b)*a(a|b){24}c"

    def answer(seed: int) -> None:
        asked = [
            params("regex", regex, temperature=1.0, seed=seed * 16 + index, max_tokens=100)
            for index in range(16)
        ]
        llm.generate([PROMPT] * 16, asked, use_tqdm=False)

    with make(folder) as llm:
        assert isinstance(llm._ranks, LocalRank)
        grammars = llm._ranks.scheduler.grammars
        grammars._budget = GrammarBudget(grammars.known, 2 * 2**20, check_bytes=2**18)
        with pytest.raises(RequestError, match="may take 2 MiB together"):
            for seed in range(100):
                answer(seed)
        assert llm.generate(PROMPT, params("regex", "yes"), use_tqdm=False)[0].text == "yes"
        answer(0)
        llm._ranks.scheduler.check_integrity()


def test_answers_end_whose_grammar_takes_more_than_the_budget(
    checkpoint: Callable[[str], Path],
) -> None:
    """Several answers follow it at once. Those of other grammars come as before.

    In a process of its own: one of tests has memory that it has touched before.
    """
    folder = checkpoint(ARCH)
    process = multiprocessing.get_context("spawn").Process(target=exceed_the_budget, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


FORCING = "The answer is [0-9]{2}, and the quick brown fox jumps over (cats|dogs) again\\."
FORCED_KINDS = [
    params("regex", FORCING),
    params("regex", FORCING, temperature=1.0, seed=4, repetition_penalty=1.3),
    params("regex", FORCING, min_tokens=50),
    params("regex", FORCING, max_tokens=11),
    params("regex", FORCING, stop=(" brown",)),
    json_params({"enum": ["a rather long text of many tokens", "b"]}, seed=1, max_tokens=60),
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
]


def answers_of(llm: LLM, kinds: list[SamplingParams]) -> tuple[list[Any], int]:
    """All answers, and the steps that they took, which other processes do not tell."""
    before = num_steps(llm)
    outs = llm.generate([PROMPT] * len(kinds), kinds, use_tqdm=False)
    answers = [(out.token_ids, out.text, out.finish_reason) for out in outs]
    return answers, num_steps(llm) - before


def num_steps(llm: LLM) -> int:
    if not isinstance(llm._ranks, LocalRank):
        return 0
    return llm._ranks.scheduler.statistics.counts.num_steps


@pytest.fixture(scope="module")
def forced(checkpoint: Callable[[str], Path]) -> list[Any]:
    """The answers of one rank, in turn."""
    with make(checkpoint(ARCH), overlap=False) as llm:
        answers, _ = answers_of(llm, FORCED_KINDS)
    return answers


def test_forced_tokens_are_in_the_answers_of_their_grammars(forced: list[Any]) -> None:
    for _, text, finish in forced[:3]:
        assert re.fullmatch(FORCING, text)
        assert finish == "stop"
    assert (len(forced[3][0]), forced[3][2]) == (11, "length")
    assert re.fullmatch("The answer is [0-9]{2}, and the quick", forced[4][1])
    assert json.loads(forced[5][1]) in ("a rather long text of many tokens", "b")


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"overlap": True, "max_prefill_length": 4},
        {"overlap": True, "cache": "naive", "num_pages": 40},
        {"overlap": False, "tp": 2},
    ],
    ids=str,
)
def test_forced_tokens_are_equal_however_they_are_scheduled(
    checkpoint: Callable[[str], Path], options: dict[str, Any], forced: list[Any]
) -> None:
    with make(checkpoint(ARCH), **options) as llm:
        assert answers_of(llm, FORCED_KINDS)[0] == forced
        if isinstance(llm._ranks, LocalRank):
            assert not llm._ranks.scheduler.grammars._matches
            llm._ranks.scheduler.check_integrity()


def test_forced_tokens_are_equal_on_ranks_that_overlap(ranks: LLM, forced: list[Any]) -> None:
    assert answers_of(ranks, FORCED_KINDS)[0] == forced


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_take_no_step_each(checkpoint: Callable[[str], Path], overlap: bool) -> None:
    with make(checkpoint(ARCH), overlap=overlap) as llm:
        [(token_ids, text, _)], num_steps = answers_of(llm, FORCED_KINDS[:1])
        assert re.fullmatch(FORCING, text)
        assert num_steps < len(token_ids) / 2

        scored = params("regex", FORCING, logprobs=1)
        [out] = llm.generate(PROMPT, scored, use_tqdm=False)
        assert re.fullmatch(FORCING, out.text)
        assert out.logprobs
        assert [entry.logprob for entry in out.logprobs if entry.logprob > 0] == []
        assert len(out.logprobs) == len(out.token_ids)


def test_a_stream_has_the_text_of_all_forced_tokens(checkpoint: Callable[[str], Path]) -> None:
    with make(checkpoint(ARCH), overlap=True) as llm:
        chunks = list(llm.stream(PROMPT, FORCED_KINDS[0]))
        assert re.fullmatch(FORCING, "".join(chunk.text for chunk in chunks))
        assert len(chunks) < 20


def test_masks_are_made_while_the_device_computes(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grammar a step's tokens are sampled before the host waits for the previous ones.

    With a grammar its logits are launched before that wait. While the masks are made, the previous
    outputs are sent and the next step is prepared.
    """
    with make(checkpoint(ARCH), overlap=True) as llm:
        engine = llm._ranks.scheduler._executor
        events: list[str] = []

        def watch(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def watched(*args: Any) -> Any:
                events.append(name)
                return original(*args)

            monkeypatch.setattr(owner, name, watched)

        for owner, name in ((engine, "launch"), (engine, "sample"), (SampledStep, "wait")):
            watch(owner, name)
        llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert events == [
            "launch",
            "sample",
            "launch",
            "sample",
            "wait",
            "launch",
            "sample",
            "wait",
            "wait",
        ]
        llm.generate(PROMPT, params("regex", "[a-c]{3}"), use_tqdm=False)  # compiles it
        while not llm._ranks.scheduler.is_idle:
            llm._step(lambda: True)
        events.clear()
        scheduler = llm._ranks.scheduler
        for owner, name in (
            (scheduler.grammars, "start_masks"),
            (scheduler._outbox, "send"),
            (scheduler.decode, "plan"),
            (engine, "prepare"),
        ):
            watch(owner, name)
        llm.generate(PROMPT, params("regex", "[a-c]{3}"), use_tqdm=False)
        step = ["plan", "prepare", "sample", "launch", "wait", "start_masks", "send"]
        assert events[:19] == ["plan", "prepare", "launch", "start_masks", "send", *step, *step]


def abort_matches_and_close(llm: LLM) -> None:
    """Masks may still be computed when their matcher is used again, and when the engine ends."""
    wanted = params("regex", "[a-c]{40}", ignore_eos=True)
    with llm:
        for _ in range(3):
            stream = llm.stream(PROMPT, wanted)
            next(stream)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            assert re.fullmatch("[a-c]{40}", llm.generate(PROMPT, wanted, use_tqdm=False)[0].text)
        stream = llm.stream(PROMPT, wanted)
        next(stream)
        next(stream)
    with pytest.raises(EngineFailed):
        list(stream)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_aborted_match_does_not_disturb_the_next(
    checkpoint: Callable[[str], Path], overlap: bool
) -> None:
    abort_matches_and_close(make(checkpoint(ARCH), overlap=overlap))


def test_an_aborted_match_does_not_disturb_the_next_on_ranks(ranks: LLM) -> None:
    """The last test of this file: it ends the ranks."""
    abort_matches_and_close(ranks)
