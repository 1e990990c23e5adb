"""Types of arguments of benchmarks: numbers within bounds, and files to write to.

Each is a `type` of argparse, so that invalid values are refused before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

_MAX_COUNT = 2**31 - 1
_MAX_S = 1_000_000
Number = TypeVar("Number", int, float)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _bounded(int(text), 1, _MAX_COUNT)


def natural(text: str) -> int:
    """Parse an integer of at least 0: a number of things, or a seed."""
    return _bounded(int(text), 0, _MAX_COUNT)


def lengths(text: str) -> tuple[int, int]:
    """Parse a number of tokens, or LEAST-MOST."""
    least, _, most = text.partition("-")
    bounds = (positive(least), positive(most or least))
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first bound is above the second")
    return bounds


def factor(text: str) -> float:
    """Parse a rate or a speed: above 0."""
    return _above_0(float(text), _MAX_COUNT)


def duration(text: str) -> float:
    """Parse seconds, above 0."""
    return _above_0(float(text), _MAX_S)


def delay(text: str) -> float:
    """Parse seconds, which may be 0."""
    return _bounded(float(text), 0, _MAX_S)


def limit(text: str) -> float:
    """Parse a number above 0; inf is no limit."""
    return _above_0(float(text), math.inf)


def share(text: str) -> float:
    """Parse a fraction of a whole."""
    return _bounded(float(text), 0, 1)


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


def output_file(text: str) -> Path:
    """Parse the path of a file to write. The file is opened, but not changed."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
    if path.is_fifo():  # to open and close it would tell its reader that this was all
        return path
    is_new = not os.path.lexists(path)  # a link that leads nowhere stays
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _bounded(value: Number, least: int, most: int) -> Number:
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{value} is outside [{least}, {most}]")
    return value


def _above_0(value: float, most: float) -> float:
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{value} is outside (0, {most:g}]")
    return value
