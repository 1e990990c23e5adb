"""A letter in a tensor's name has one meaning in the package; each file repeats those it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import minisgl

PACKAGE = Path(minisgl.__file__).parent
FILES = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
SUFFIX = re.compile(r"\b_*[a-z]\w*?_([A-Z0-9]*[A-Z][A-Z0-9]*)\b")  # q_TNH, not MAX_COUNT or top_1
LINE = re.compile(r"^# Dimensions: (.+(?:\n#  ?.+)*)$", re.MULTILINE)


@cache
def key() -> dict[str, str]:
    """From letter to meaning, as the docstring of core.py lists them."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "core.py").read_text())) or ""
    _, _, listed = docstring.partition("The dimension key")
    return dict(re.findall(r"^ +([A-Z])  (.+)$", listed, re.MULTILINE))


def allowed_meanings(letter: str) -> set[str]:
    """In full, or up to the first comma. A file may add more after `:`, `;` or `.`."""
    meaning = key()[letter].partition(":")[0]
    return {meaning, meaning.partition(",")[0]}


def repeated(source: str) -> dict[str, str]:
    """From letter to meaning, as the comment of a file repeats them."""
    comments = LINE.findall(source)
    assert len(comments) <= 1, "one comment lists the dimensions of a file"
    text = " ".join(re.sub(r"\n#\s*", " ", comment).rstrip(".") for comment in comments)
    return dict(re.findall(r"([A-Z]) (.+?)(?=, [A-Z] |$)", text))


def names(tree: ast.AST) -> Iterator[str]:
    """Variables, parameters, attributes and arguments by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def letters_used(source: str) -> set[str]:
    return letters(" ".join(names(ast.parse(source))))


def letters(text: str) -> set[str]:
    """Those in the suffixes of tensors' names."""
    return {char for suffix in SUFFIX.findall(text) for char in suffix if char.isalpha()}


def test_the_key_is_found() -> None:
    assert key()["T"].startswith("tokens of a step")
    assert letters_used("q_TNH = f(x, k_2B=MAX_COUNT, top_1=self._y_D)") == set("TNHBD")
    assert repeated("# Dimensions: B requests of a step, or of a graph,\n#     T tokens.\n") == {
        "B": "requests of a step, or of a graph",
        "T": "tokens",
    }


@pytest.mark.parametrize("file", FILES)
def test_a_file_repeats_its_letters_with_the_meanings_of_the_key(file: str) -> None:
    source = (PACKAGE / file).read_text()
    listed = repeated(source)

    assert letters_used(source) - set(listed) == set()
    assert set(listed) - letters(source) == set()
    for letter, meaning in listed.items():
        assert re.split("[:;.]", meaning)[0] in allowed_meanings(letter), letter
