"""The shape of the package: who may import whom, functions, types, exports. Read off the syntax trees."""

from __future__ import annotations

import ast
import importlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import minisgl

PACKAGE = Path(minisgl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TIERS = [
    {"version", "core", "config", "sampling_params", "errors", "utils"},
    {"checkpoint", "distributed", "message", "kernel"},
    {"layers", "attention", "kvcache", "moe"},
    {"models"},
    {"engine", "scheduler"},
    {"server", "tokenizer", "llm", "benchmark"},
]
WITHIN_A_TIER = {
    ("core", "errors"),
    ("core", "sampling_params"),
    ("config", "errors"),
    ("config", "utils"),
    ("sampling_params", "errors"),
    ("utils", "errors"),
    ("message", "core"),
    ("layers", "attention"),
    ("layers", "moe"),
    ("attention", "kvcache"),
    ("scheduler", "engine"),
    ("server", "tokenizer"),
    ("llm", "tokenizer"),
}
