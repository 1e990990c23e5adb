"""Rewrites the numbers of JSON schemas for llguidance.

llguidance reads each as a float of 64 bits, and one of 16 or 17 digits not always as the nearest.
Bounds of integers have 64 bits. In a range whose ends have the same integer part, a number without
a fraction may reach an exclusive end. A number whose digits begin as those of a bound needs as many
of them. So bounds are rewritten, and a number that would become another is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from minisgl.errors import InvalidRequest
from minisgl.schemas.subschemas import Schema

_INSIDE = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
BOUNDS = tuple(_INSIDE)
_MAX_PLAIN = 2**53  # all integers up to it are floats
# Bounds of integers. Below, llguidance refuses a schema, or its recursion ends the process.
_LEAST = -(2**63) + 2**10
_GREATEST = 2**63 - 1  # is read as 2**63, which becomes the greatest integer of 64 bits
# The bound that stands for "greater than 0". A number with a bound has no exponent, and the regular
# expression of a bound is nested twice for each of its digits, up to 250 deep.
_LEAST_POSITIVE = 1e-45


def check_literals(keyword: str, value: Any) -> None:
    """Refuse a `const` or `enum` if a number in it would become another.

    Raises:
        InvalidRequest: there is such a number.
    """
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            check_literals(keyword, item)
    elif _is_number(value):
        if not _LEAST <= value <= _GREATEST:
            raise _out_of_range(keyword, value)
        _check_read(keyword, value, value)


def write_bounds(schema: Schema) -> None:
    """Write the bounds of numbers, in place, such that no answer is beyond them.

    From 2**53 on, llguidance writes a bound of `number` with the digits that its float needs, and
    then zeros. A bound that is another number then is refused, if `number` stands beside it. Where
    no type stands there, it may be of integers, of which it is exact. A number may then exceed it
    by less than the distance to the next float.

    Raises:
        InvalidRequest: a bound would become another one.
    """
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if not any(name in names for name in ("integer", "number", None)):
        return
    for keyword, sign in (("minimum", 1), ("maximum", -1)):
        _write_inclusive(schema, keyword, sign, names)
        _write_exclusive(schema, keyword, sign, names)
    if "number" in names:
        _allow_beginnings(schema)


def _allow_beginnings(schema: Schema) -> None:
    """Allow numbers whose digits are a beginning of those of a bound, in place.

    A number that begins as a bound has to have all of its digits there: with a maximum of 0.95
    there would be 0.90 and no 0.9. A number with a 0 at its end is left out.
    """
    beginnings = sorted({number for keyword in BOUNDS for number in _beginnings(schema, keyword)})
    if not beginnings:
        return
    bounds = {keyword: schema.pop(keyword) for keyword in BOUNDS if keyword in schema}
    options = [bounds, {"enum": beginnings}]
    if "anyOf" not in schema:
        schema["anyOf"] = options
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"] = [*schema["allOf"], {"anyOf": options}]
    else:  # llguidance says what is wrong with it
        schema.update(bounds)


def _beginnings(schema: Schema, keyword: str) -> Iterator[float]:
    """Numbers of fewer digits with which the digits of a bound begin, and which all bounds allow.

    The bound is the one away from 0: a positive maximum, a negative minimum.
    """
    bound = schema.get(keyword)
    sign = 1 if keyword.endswith("aximum") else -1
    if not _is_number(bound) or bound * sign <= 0:
        return
    whole, _, fraction = format(Decimal(repr(bound)), "f").partition(".")
    for end in range(1, len(fraction)):
        number = float(f"{whole}.{fraction[:end]}")
        ends_in_zero = fraction[end - 1] == "0"
        if not ends_in_zero and _as_read(number) == number and _is_within(number, schema):
            yield number


def _is_within(number: float, schema: Schema) -> bool:
    return all(
        not _is_number(bound := schema.get(keyword)) or is_inside(number, bound)
        for keyword, is_inside in _INSIDE.items()
    )


def _write_inclusive(schema: Schema, keyword: str, sign: int, names: list[Any]) -> None:
    exclusive_keyword = f"exclusive{keyword.capitalize()}"
    bound = schema.get(keyword)
    if not _is_number(bound):
        return
    if schema.get(exclusive_keyword) is True:  # in draft 4
        schema[exclusive_keyword] = schema.pop(keyword)
    else:
        schema[keyword] = _readable_bound(keyword, bound, bound, sign, names)


def _write_exclusive(schema: Schema, keyword: str, sign: int, names: list[Any]) -> None:
    """Write an exclusive bound, as an inclusive one further in if llguidance would include it."""
    exclusive_keyword = f"exclusive{keyword.capitalize()}"
    exclusive = schema.get(exclusive_keyword)
    if not _is_number(exclusive):
        return
    inner = _inside(exclusive, sign, names)
    if inner is None:
        if abs(exclusive) >= _MAX_PLAIN and {"integer", "number"} <= set(names):
            raise _not_followed(exclusive_keyword, exclusive, "integers would reach it")
        schema[exclusive_keyword] = _readable_bound(
            exclusive_keyword, exclusive, exclusive, sign, names
        )
        return
    readable = _readable_bound(exclusive_keyword, exclusive, inner, sign, names)
    bound = schema.get(keyword, readable)
    if _is_number(bound):  # llguidance says what is wrong with another value
        del schema[exclusive_keyword]
        schema[keyword] = max(bound, readable) if sign > 0 else min(bound, readable)


def _inside(exclusive: float, sign: int, names: list[Any]) -> float | None:
    """The first number inside a bound that llguidance would include; None if it would not."""
    if abs(exclusive) >= _MAX_PLAIN:  # 1 more or less may be no float
        return None if "number" in names else math.floor(exclusive) + sign
    has_fractions = "number" in names or None in names
    # Towards 0 the bound has an integer part that nothing inside has.
    if not has_fractions or exclusive * sign < 0 or not float(exclusive).is_integer():
        return None
    return math.nextafter(exclusive, sign * math.inf) if exclusive else sign * _LEAST_POSITIVE


def _readable_bound(keyword: str, said: float, bound: float, sign: int, names: list[Any]) -> float:
    """A bound that llguidance reads exactly, and that allows no more than this one."""
    if sign > 0 and bound < _LEAST:
        return _LEAST if "integer" in names else bound
    if sign < 0 and bound >= _GREATEST:
        return bound
    if not _LEAST <= bound <= _GREATEST:
        raise _out_of_range(keyword, said)
    written = Decimal(repr(float(bound)))
    if "number" in names and abs(bound) >= _MAX_PLAIN and written != bound:
        raise _not_followed(keyword, said, f"it is written as {written:f}")
    if isinstance(bound, int):
        _check_read(keyword, said, bound)
        return bound
    while _as_read(bound) != bound:
        bound = math.nextafter(bound, sign * math.inf)
    return bound


def _check_read(keyword: str, said: float, number: float) -> None:
    read = _as_read(number)
    if read != number != _GREATEST:  # Python compares an integer and a float exactly
        wrong = int(read) if isinstance(number, int) else read
        reason = f"numbers are read as floats of 64 bits, {number} as {wrong}"
        raise _not_followed(keyword, said, reason)


def _not_followed(keyword: str, number: float, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{keyword} in a schema has the number {number}, which cannot be followed: {reason}",
        param="grammar",
    )


def _out_of_range(keyword: str, number: float) -> InvalidRequest:
    return InvalidRequest(
        f"{keyword} in a schema has the number {str(number)[:64]}; it must be from {_LEAST} to "
        f"{_GREATEST}",
        param="grammar",
    )


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of JSON, which has no infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _as_read(number: float) -> float:
    """The float that the JSON reader of llguidance, serde_json, makes of a number.

    It takes the digits as an integer and multiplies or divides it by a power of 10. Each of the
    three steps may round.
    """
    if isinstance(number, int):
        return float(number)
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    value = float("".join(map(str, digits)))
    assert isinstance(exponent, int)  # of a finite number
    while exponent < -308:
        value /= 1e308
        exponent += 308
    power = float(f"1e{abs(exponent)}")
    value = value * power if exponent > 0 else value / power
    return -value if sign else value
