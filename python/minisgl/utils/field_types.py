"""Checks that the fields of a dataclass have values of their types, which Python does not do."""

from __future__ import annotations

from dataclasses import Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def wrong_field(instance: DataclassInstance) -> Field[Any] | None:
    """Return the first field whose value has another type than is declared; None if all are right.

    An integer counts as a float, but a bool does not. A list or a set may stand for a tuple.
    """
    hints, struct = _declared(type(instance))
    if _fits(instance, struct):  # a microsecond for all fields together
        return None
    return next(
        (
            each
            for each in fields(instance)
            if not _fits(getattr(instance, each.name), hints[each.name])
        ),
        None,
    )


@cache
def _declared(kind: type[DataclassInstance]) -> tuple[dict[str, Any], Any]:
    """The types of a class's fields by their names, and as one struct type."""
    hints = get_type_hints(kind)
    return hints, msgspec.defstruct(kind.__name__, list(hints.items()))


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, from_attributes=True)
    except Exception:  # not only msgspec's own: half a surrogate pair, or an attribute, has others
        return False
    return True
