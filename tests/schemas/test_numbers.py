"""No answer is beyond the bounds of a schema, and no number of a schema becomes another."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import JSON_OPTIONS
from minisgl.schemas.json_schemas import readable_schema

BYTES = LLTokenizer("byte")


def matcher_of(schema: Any) -> LLMatcher:
    text = readable_schema(json.dumps(schema))
    source = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    return LLMatcher(BYTES, source, log_level=0)


def matches(matcher: LLMatcher, text: str) -> bool:
    assert matcher.get_error() == ""
    tokens = list(text.encode())
    copy = matcher.deep_copy()
    is_begun: bool = copy.validate_tokens(tokens) == len(tokens)
    return is_begun and copy.consume_tokens(tokens) and copy.is_accepting()


def allows(schema: Any, value: Any) -> bool:
    return matches(matcher_of(schema), json.dumps(value))


FOLLOWED = [
    *(
        0,
        1,
        -1,
        2**53,
        -(2**53),
        2**53 + 2,
        10**18,
        2**62,
        2**63 - 1024,
        2**63 - 1,
        -(2**63) + 1024,
    ),
    *(0.5, 0.1, -2.75, 1e-7, 1e16, 3.0, 0.30000000000000004),
]
NOT_FOLLOWED = [
    *(2**53 + 1, 1234567890123456789, 1234567890123456791, 10**18 - 1, -(10**18) - 1),
    *(2**63 - 2, 2**63, 2**64, -(2**63) + 1023, -(2**63), -(2**64), 10**4000),
    *(966.0936904166955, -1e19, 1e19, 1e300),
]


def places(number: Any, keyword: str) -> list[tuple[Any, str]]:
    """Schemas with a literal, each with an answer where `#` stands for the literal."""
    literal = {"const": number} if keyword == "const" else {"enum": ["a", number]}
    deep = {"a": [1, {"b": number}]}
    return [
        (literal, "#"),
        ({"type": ["integer", "number", "string"], **literal}, "#"),
        ({"type": "object", "properties": {"a": literal}, "required": ["a"]}, '{"a": #}'),
        ({"anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": literal}}, "#"),
        ({"const": deep} if keyword == "const" else {"enum": [None, deep]}, '{"a":[1,{"b":#}]}'),
    ]


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("number", FOLLOWED, ids=str)
def test_literals_are_followed_exactly(number: Any, keyword: str) -> None:
    written = format(Decimal(repr(number)).normalize(), "f")
    others = [number + 1, number - 1, -number or 5]
    for schema, answer in places(number, keyword):
        matcher = matcher_of(schema)
        assert matches(matcher, answer.replace("#", written))
        for other in others:
            text = format(Decimal(repr(other)).normalize(), "f")
            assert matches(matcher, answer.replace("#", text)) == (text == written)


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("number", NOT_FOLLOWED, ids=lambda number: str(number)[:25])
def test_a_literal_that_would_become_another_is_refused(number: Any, keyword: str) -> None:
    for schema, _ in places(number, keyword):
        with pytest.raises(InvalidRequest) as refusal:
            readable_schema(json.dumps(schema))
        assert f"{keyword} in a schema has the number {str(number)[:60]}" in str(refusal.value)
        assert refusal.value.param == "grammar"


def test_a_refusal_says_how_a_number_would_be_read() -> None:
    with pytest.raises(InvalidRequest, match=r"1234567890123456789 as 1234567890123456768$"):
        readable_schema('{"enum": [1234567890123456789]}')
    with pytest.raises(InvalidRequest, match=r"966.0936904166955 as 966.0936904166956$"):
        readable_schema('{"const": 966.0936904166955}')


def test_floats_of_many_digits_are_followed_or_refused() -> None:
    """What llguidance makes of a number, it writes itself where nothing else is allowed."""
    rng = random.Random(0)
    num_refused = 0
    for _ in range(2_000):
        number = rng.choice([1, 1e3, 1e-9, 1e12]) * rng.uniform(-1, 1)
        schema = {"const": number, "x-guidance": {"whitespace_flexible": False}}
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        written = LLMatcher(BYTES, source, log_level=0).compute_ff_bytes()
        try:
            readable_schema(json.dumps(schema))
        except InvalidRequest:
            num_refused += 1
            assert float(written) != number
        else:
            assert float(written) == number
    assert 0 < num_refused < 500


INTEGER_BOUNDS = [
    *(-(2**53) - 2, -(2**53), -(2**53) + 1, -1, 0, 5, 2**53 - 1, 2**53, 2**53 + 2, 10**17),
    *(2**60, 2**62 + 2**12, 2**63 - 1, 2**63 - 1024, -(2**63) + 1024, -(2**60)),
]


@pytest.mark.parametrize("types", ["integer", ["integer", "null"], None], ids=str)
@pytest.mark.parametrize("bound", INTEGER_BOUNDS)
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_bounds_of_integers_are_exact_or_refused(keyword: str, bound: int, types: Any) -> None:
    limits = {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1}
    limits.pop(keyword.lower().replace("exclusive", ""))
    schema = {"allOf": [{"type": "integer"}, {"type": types, keyword: bound, **limits}]}
    if types is None:
        del schema["allOf"][1]["type"]
    try:
        matcher = matcher_of(schema)
    except InvalidRequest as refusal:
        assert f"{keyword} in a schema has the number {bound}" in str(refusal)
        assert keyword.startswith("exclusive")
        assert abs(bound) >= 2**53
        return
    for number in range(bound - 3, bound + 4):
        if -(2**63) + 1024 <= number < 2**63:
            is_beyond = {
                "minimum": number < bound,
                "maximum": number > bound,
                "exclusiveMinimum": number <= bound,
                "exclusiveMaximum": number >= bound,
            }[keyword]
            if matcher.get_error() == "":
                assert matches(matcher, str(number)) != is_beyond


@pytest.mark.parametrize("types", ["integer", "number", ["integer", "null"], None], ids=str)
@pytest.mark.parametrize(
    ("keyword", "bound"),
    [
        ("minimum", 1234567890123456789),
        ("maximum", 1234567890123456789),
        ("maximum", -1234567890123456789),
        ("maximum", 9999999999999999),
        ("minimum", 2**63),
        ("minimum", 1e300),
        ("maximum", -(2**63)),
        ("maximum", -1e19),
    ],
    ids=str,
)
def test_a_bound_that_would_become_another_is_refused(keyword: str, bound: Any, types: Any) -> None:
    schema = {"items": {keyword: bound, **({"type": types} if types else {})}}
    with pytest.raises(InvalidRequest) as refusal:
        readable_schema(json.dumps(schema))
    assert f"{keyword} in a schema has the number {bound}" in str(refusal.value)


LARGE_BOUNDS = [
    *(2**53, 2**53 + 2, 2**60, 2**62 + 2**12, 10**17, 2**63 - 1024),
    *(9.007199254740993e15, 1e18, 1.2345678901234568e17),
]


@pytest.mark.parametrize("types", ["number", ["number", "null"], ["integer", "number"]], ids=str)
@pytest.mark.parametrize(
    "bound", [sign * bound for bound in LARGE_BOUNDS for sign in (1, -1)], ids=str
)
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_large_bounds_of_numbers_are_exact_or_refused(
    keyword: str, bound: float, types: Any
) -> None:
    """A number that is compared is the text of the answer, with a fraction or without."""
    try:
        matcher = matcher_of({"type": types, keyword: bound})
    except InvalidRequest as refusal:
        assert f"{keyword} in a schema has the number {bound}" in str(refusal)
        return
    if matcher.get_error():  # llguidance refuses what it cannot express
        return
    exact = int(bound)
    steps = [0, 1, 2, int(math.ulp(bound)) // 2, int(math.ulp(bound)), 3 * int(math.ulp(bound))]
    for number in {exact + sign * step for step in steps for sign in (1, -1)}:
        is_beyond = {
            "minimum": number < exact,
            "maximum": number > exact,
            "exclusiveMinimum": number <= exact,
            "exclusiveMaximum": number >= exact,
        }[keyword]
        assert matches(matcher, str(number)) != is_beyond, number
        fraction = f"{number}.0"
        assert not (matches(matcher, fraction) and is_beyond), fraction


def test_what_bounds_no_number_is_left_as_it_is() -> None:
    schema = {"type": "string", "minimum": 2**60 + 1, "exclusiveMaximum": 0}
    assert json.loads(readable_schema(json.dumps(schema))) == schema


@pytest.mark.parametrize("outer", [2**63, 10**19, 10**25, 1e25], ids=str)
def test_integers_may_have_bounds_beyond_64_bits(outer: Any) -> None:
    for schema in (
        {"type": "integer", "minimum": -outer, "maximum": outer},
        {"type": "integer", "exclusiveMinimum": -outer, "exclusiveMaximum": outer},
    ):
        assert allows(schema, 2**63 - 1)
        assert allows(schema, -(2**63) + 1024)


def test_integers_that_no_integer_of_64_bits_can_be_are_refused() -> None:
    """llguidance's recursion would end the process."""
    with pytest.raises(InvalidRequest, match="maximum in a schema has the number -1e"):
        readable_schema('{"allOf": [{"type": "integer"}, {"minimum": -1e19, "maximum": -1e19}]}')


def bounds(rng: random.Random) -> Iterator[tuple[dict[str, Decimal], list[Decimal]]]:
    """Ranges that hold a number, and numbers in and around them."""
    values = [*map(Decimal, ("0", "0.1", "0.5", "1", "1.5", "9", "10", "10.1", "99.95", "100"))]
    values += [-value for value in values if value]
    for low, high in itertools.combinations(sorted(values), 2):
        steps = [Decimal(1), Decimal("0.1"), Decimal("0.01"), Decimal("0.0001")]
        near = {value + sign * step for value in (low, high) for step in steps for sign in (1, -1)}
        numbers = [low, high, Decimal(0), (low + high) / 2, *near]
        for lower, upper in itertools.product(
            ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
        ):
            yield {lower: low, upper: high}, rng.sample(numbers, len(numbers))


def is_within(number: Decimal, said: dict[str, Decimal]) -> bool:
    return (
        said.get("minimum", number) <= number <= said.get("maximum", number)
        and said.get("exclusiveMinimum", number - 1) < number
        and number < said.get("exclusiveMaximum", number + 1)
    )


def as_json(said: dict[str, Decimal]) -> dict[str, Any]:
    return {
        keyword: int(value) if value == int(value) else float(value)
        for keyword, value in said.items()
    }


def ways_to_say(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "number", **said}
    first, second = ({keyword: value} for keyword, value in said.items())
    yield {"allOf": [{"type": "number", **first}, second]}
    yield {"$ref": "#/$defs/a", **second, "$defs": {"a": {"type": "number", **first}}}


def test_numbers_are_within_their_bounds() -> None:
    for said, numbers in bounds(random.Random(0)):
        for schema in ways_to_say(as_json(said)):
            matcher = matcher_of(schema)
            for number in numbers:
                text = format(number.normalize(), "f")
                assert matches(matcher, text) == is_within(number, said), (schema, text)
            for zero in ("-0", "0.0", "-0.00"):
                if matches(matcher, zero):
                    assert is_within(Decimal(0), said), schema


def random_bounds(rng: random.Random) -> dict[str, Decimal]:
    num_places = rng.randint(1, 4)
    low, high = sorted(rng.sample(range(-3 * 10**num_places, 3 * 10**num_places), 2))
    said = {
        rng.choice(["minimum", "exclusiveMinimum"]): Decimal(low).scaleb(-num_places),
        rng.choice(["maximum", "exclusiveMaximum"]): Decimal(high).scaleb(-num_places),
    }
    if rng.random() < 0.5:
        del said[rng.choice(list(said))]
    return said


def near(bound: Decimal) -> set[Decimal]:
    """Numbers with up to six places, at the bound and beside it."""
    steps = [(places, step) for places in range(7) for step in range(-2, 3)]
    return {round(bound, places) + Decimal(step).scaleb(-places) for places, step in steps}


def test_a_number_may_have_fewer_digits_than_the_bound_it_begins_like() -> None:
    rng = random.Random(0)
    for _ in range(300):
        said = random_bounds(rng)
        matcher = matcher_of({"type": "number", **as_json(said)})
        for number in set().union(*map(near, said.values())):
            text = format(number.normalize(), "f")
            assert matches(matcher, text) == is_within(number, said), (said, text)


def test_such_a_number_has_to_follow_the_rest_of_its_schema() -> None:
    most = {"maximum": 0.955}
    for schema, allowed, forbidden in (
        ({"type": ["number", "string"], "minLength": 2, **most}, '0.9 0.95 "ab"', '0.96 "a"'),
        ({"type": "number", "multipleOf": 0.1, **most}, "0.9", "0.95"),
        (
            {"type": "number", "anyOf": [{"minimum": 0.92}, {"const": 0.5}], **most},
            "0.95 0.5",
            "0.9",
        ),
        ({"type": "number", "enum": [0.5, 0.95], **most}, "0.5 0.95", "0.9"),
        ({"items": {"type": "number", **most}, "minItems": 2}, "[0.9,0.95]", "[0.9] [0.9,1]"),
    ):
        matcher = matcher_of(schema)
        assert [text for text in allowed.split() if not matches(matcher, text)] == []
        assert [text for text in forbidden.split() if matches(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.3, "multipleOf": 0.1}, "0.1 0.2 0.3", "0 0.15 0.4"),
        ({"exclusiveMinimum": 0}, "0.5 0.50 0.0000000001 7", "0 0.0 -1"),
        ({"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}, "0.1 0.5", "0 0.0"),
        ({"exclusiveMinimum": False, "minimum": 0, "maximum": 0.5}, "0 0.5", "-0.1"),
        ({"minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5}, "0.1", "0"),
        ({"minimum": 0.2, "exclusiveMinimum": 0, "maximum": 0.5}, "0.2 0.3", "0 0.1"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.1 -0.5", "-0 0 -0.0 -0.6"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1.1", "-1 -1.0"),
        ({"minimum": 0.1, "maximum": 966.0936904166955}, "966 5.5", "966.0936904166956"),
        ({"exclusiveMaximum": 1e16, "minimum": 0}, "9999999999999998", "10000000000000000"),
    ],
)
def test_other_bounds_of_numbers(schema: dict[str, Any], allowed: str, forbidden: str) -> None:
    matcher = matcher_of({"type": "number", **schema})
    assert [text for text in allowed.split() if not matches(matcher, text)] == []
    assert [text for text in forbidden.split() if matches(matcher, text)] == []


@pytest.mark.parametrize("bound", ["0", {}, None, [2**60 + 1]], ids=str)
def test_what_is_no_bound_is_still_refused(bound: Any) -> None:
    schema = {"type": "number", "minimum": bound, "exclusiveMinimum": 0}
    assert "Expected f64 for 'minimum'" in matcher_of(schema).get_error()
