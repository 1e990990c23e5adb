"""The parameters of a request, their bounds, and the record of them that the engine reads.

Next to read: "A parameter's way" in docs/architecture.md.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from minisgl.errors import InvalidRequest
from minisgl.schemas import check_regex
from minisgl.utils.excerpts import excerpt
from minisgl.utils.field_types import wrong_field

MIN_SEED = -(2**63)  # OpenAI's bounds
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_GRAMMAR = 2**17  # characters
MAX_SALT = 256  # characters
MAX_STOPS = 32
MAX_BIASES = 1024
TOOL_NOTE = " // the tool "  # ends a line of Lark with the name of the tool whose calls it has
JSON_OPTIONS = {  # of llguidance: bounded white space, or a model may write nothing else
    "whitespace_pattern": r"[ \t\r\n]{0,16}",
    "coerce_one_of": True,
}


# The numbers that say how a request's tokens are chosen.
SAMPLING_DTYPE = np.dtype(
    [
        ("seed", "i8"),
        ("temperature", "f4"),
        ("is_masked", "i4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
    ]
)


GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer has to match from its first character to its last.

    Attributes:
        text: a JSON schema, a regular expression, or llguidance's variant of a Lark grammar; at
            most 131,072 characters. Regular expressions are in Rust's syntax, but that `[`, `&&`,
            `--` and `~~` in a character class are characters, as in Python.

    Raises:
        InvalidRequest: the kind is not known, the text is not a str, or it is a regular expression
            that ends with a single backslash, or has the flag x and tabs or line breaks.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise InvalidRequest(
                f"the kind of a grammar must be one of {kinds}, got {excerpt(self.kind)}",
                param="grammar",
            )
        if not isinstance(self.text, str):
            raise InvalidRequest(
                f"the text of a grammar must be a str, got {excerpt(self.text)}", param="grammar"
            )
        if self.kind == "regex":
            check_regex(self.text)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token of a request.

    They apply in this order: bias and penalties, temperature, top_k, top_p, min_p. Ties at a border
    are kept, except that a top_k of 1 is greedy.

    Attributes:
        max_tokens: tokens to generate at most; None means up to the end of the context. With 0 the
            prompt is computed and nothing else.
        temperature: 0 is greedy; else logits are divided by it. In [0, 100].
        top_k: keep the k most likely tokens, >= 1; 1 is greedy, None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
        seed: the token at a position depends on its logits, the seed and the position only; None
            draws one.
        ignore_eos: go on past an end-of-sequence token.
        min_tokens: no end-of-sequence token and none of `stop_token_ids` until that many tokens are
            generated, and no text of `stop` that they complete ends the answer; in [0, max_tokens].
            Without max_tokens they have to fit the context, behind the prompt.
        stop: texts that end the answer, which stops in front of them; at most 32 of 1 to 1024
            characters. One text may be given as it is, and becomes a tuple.
        stop_token_ids: tokens that end the answer; at most 32.
        include_stop_str_in_output: the answer stops after the text, or the token, that ended it.
        skip_special_tokens: leave tokens such as end-of-sequence out of the text.
        presence_penalty: subtracted from the logit of each token in the answer so far; in [-2, 2].
        frequency_penalty: subtracted once for each time that a token is in the answer; in [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it,
            negative ones multiplied (Keskar et al. 2019, arXiv:1909.05858); in (0, 10], 1 changes
            nothing.
        logit_bias: token id to what is added to its logit, in [-100, 100]; at most 1024 ids.
        logprobs: return the log probability of each token and of this many of the likeliest, in
            [0, 20]; None returns none. They are the model's, before temperature, penalties, filters
            and grammar.
        prompt_logprobs: return log probabilities for each token of the prompt but the first. Then
            no part of the prompt is taken from a cache.
        embeds: return the hidden state after the final norm of the prompt's last token, as a
            vector of length 1.
        priority: a request with a smaller one is computed first and keeps its pages longer; 32
            bits, may be negative.
        grammar: only tokens that continue a match are chosen; the answer ends where the match does.
        cache_salt: cached prefixes are found by requests with an equal one only; 1 to 256
            characters.

    Numbers may be numpy's, and integers whatever has `__index__`, also those in tuples and dicts.

    Raises:
        InvalidRequest: a value is outside its bounds, or of another type.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embeds: bool = False
    priority: int = 0
    grammar: Grammar | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_types()
        self._keep_own_collections()
        self._check_numbers()
        self._check_sizes()
        self._check_tokens()
        self._check_texts()

    def _check_types(self) -> None:
        if wrong_field(self) is not None:
            given = {each.name: getattr(self, each.name) for each in fields(self)}
            for name, value in given.items():
                object.__setattr__(self, name, _with_own_numbers(value))
            wrong = wrong_field(self)
            if wrong is not None:
                _refuse_type(wrong.name, wrong.type, given[wrong.name])
        if not isinstance(self.grammar, Grammar | None):
            _refuse_type("grammar", "Grammar | None", self.grammar)

    def _keep_own_collections(self) -> None:
        """The caller may go on to change theirs, which would pass by the checks."""
        for name in ("stop", "stop_token_ids", "logit_bias"):
            value = getattr(self, name)
            if value:
                object.__setattr__(self, name, copy(value))

    def _check_numbers(self) -> None:
        _require(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or 0 <= self.max_tokens <= MAX_COUNT,
            f"in [0, {MAX_COUNT}]",
        )
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "in [0, 100]")
        _require(
            "top_k",
            self.top_k,
            self.top_k is None or 1 <= self.top_k <= MAX_COUNT,
            f"in [1, {MAX_COUNT}], or absent for all",
        )
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require(
            "seed",
            self.seed,
            self.seed is None or MIN_SEED <= self.seed <= MAX_SEED,
            f"in [{MIN_SEED}, {MAX_SEED}]",
        )
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, f"in [0, {most}]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), abs(getattr(self, name)) <= 2, "in [-2, 2]")
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            0 < self.repetition_penalty <= 10,
            "in (0, 10]",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(name, count, count is None or 0 <= count <= 20, "in [0, 20], or absent")
        _require(
            "priority",
            self.priority,
            abs(self.priority) <= MAX_COUNT,
            f"in [-{MAX_COUNT}, {MAX_COUNT}]",
        )

    def _check_sizes(self) -> None:
        for name, count, bound in (
            ("stop", len(self.stop), MAX_STOPS),
            ("stop_token_ids", len(self.stop_token_ids), MAX_STOPS),
        ):
            _require(f"the number of {name}", count, count <= bound, f"at most {bound}", name)
        for text in self.stop:
            _require(
                "the length of a stop text",
                len(text),
                1 <= len(text) <= 1024,
                "in [1, 1024]",
                "stop",
            )
        _require(
            "the size of logit_bias",
            len(self.logit_bias),
            len(self.logit_bias) <= MAX_BIASES,
            f"at most {MAX_BIASES}",
            "logit_bias",
        )
        if self.grammar is not None:
            size = len(self.grammar.text)
            _require(
                "the length of the grammar",
                size,
                size <= MAX_GRAMMAR,
                f"at most {MAX_GRAMMAR}",
                "grammar",
            )
        if self.cache_salt is not None:
            size = len(self.cache_salt)
            _require(
                "the length of cache_salt",
                size,
                1 <= size <= MAX_SALT,
                f"in [1, {MAX_SALT}]",
                "cache_salt",
            )

    def _check_tokens(self) -> None:
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token in tokens:
                _require(
                    f"a token id of {name}",
                    token,
                    0 <= token <= MAX_COUNT,
                    f"in [0, {MAX_COUNT}]",
                    name,
                )
        for token, bias in self.logit_bias.items():
            _require(
                f"logit_bias of {token}", bias, abs(bias) <= 100, "in [-100, 100]", "logit_bias"
            )

    def _check_texts(self) -> None:
        """All of them go to other processes as UTF-8, which has no half of a surrogate pair."""
        texts = [("stop", text) for text in self.stop]
        if self.grammar is not None:
            texts.append(("grammar", self.grammar.text))
        if self.cache_salt is not None:
            texts.append(("cache_salt", self.cache_salt))
        for name, text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"{name} has half a surrogate pair at {error.start}", param=name
                ) from None

    def ends_at(self, token: int, eos_ids: Collection[int]) -> bool:
        """Whether a token ends the answer, of which it is no part."""
        return token in self.stop_token_ids or (token in eos_ids and not self.ignore_eos)

    @property
    def shapes_text(self) -> bool:
        """Whether the detokenizer needs these parameters."""
        return bool(self.stop) or self.include_stop_str_in_output or not self.skip_special_tokens

    @property
    def has_penalty(self) -> bool:
        adds = self.presence_penalty != 0 or self.frequency_penalty != 0
        return adds or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties or a bias."""
        return self.has_penalty or bool(self.logit_bias)


def pack_sampling(params: SamplingParams, seed: int) -> bytes:
    """Pack parameters into one item of `SAMPLING_DTYPE`. No top_k is its largest number."""
    # The filter would keep all tokens that tie for the first place.
    temperature = 0.0 if params.top_k == 1 else params.temperature
    numbers = (
        seed,
        temperature,
        params.grammar is not None,
        params.top_k or MAX_COUNT,
        params.top_p,
        params.min_p,
    )
    return np.array(numbers, dtype=SAMPLING_DTYPE).tobytes()


def _with_own_numbers(value: Any) -> Any:
    """A value with other libraries' numbers replaced by Python's.

    Those in a container are replaced too, but not those in a container within it: no field has any.
    """
    if isinstance(value, dict):
        return {_own_number(key): _own_number(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_own_number, value))
    return _own_number(value)


def _own_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool):
        return value  # it would be an index, too
    try:
        index = operator.index(value)
        # Tensors have this method, which makes a bool of a flag; its index is an integer.
        item = getattr(value, "item", None)
        return item() if callable(item) else index
    except Exception:  # code of another library may raise any
        return value


def _refuse_type(name: str, kind: object, value: object) -> NoReturn:
    raise InvalidRequest(f"{name} must be of the type {kind}, got {excerpt(value)}", param=name)


def _require(
    name: str, value: float | None, holds: bool, bound: str, param: str | None = None
) -> None:
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be {bound}, got {excerpt(value)}", param=param or name)
