"""The README's numbers are true: how large the parts are, and with which versions they run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import minisgl

ROOT = Path(__file__).parents[1]
PACKAGE = Path(minisgl.__file__).parent
README = (ROOT / "README.md").read_text()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NATIVE = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".S"}
TOLERANCE = 0.1  # a size is rounded, and a change need not touch the README


# ---- sizes


def python_lines(text: str) -> int:
    """Lines of code, without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings |= lines_of(node.body[0].lineno, node.body[0].end_lineno or 0)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= lines_of(token.start[0], token.end[0])
    return len(code - docstrings)


def lines_of(first: int, last: int) -> set[int]:
    return set(range(first, last + 1))


def native_lines(text: str) -> int:
    without_comments = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in without_comments.splitlines())


@cache
def size(path: Path) -> int:
    if path.suffix == ".py":
        return python_lines(path.read_text())
    return native_lines(path.read_text()) if path.suffix in NATIVE else 0


def sum_of(paths: Iterable[Path]) -> int:
    return sum(map(size, paths))


def stated(pattern: str) -> list[int]:
    """The numbers that the groups of a pattern match in the README's section of sizes."""
    section = README.partition("\n## How large it is\n")[2].partition("\n## ")[0]
    found = re.search(pattern, section)
    assert found, pattern
    return [int(number.replace(",", "")) for number in found.groups()]


def test_lines_are_counted_as_the_readme_says() -> None:
    source = (
        '"""Doc.\n\nMore.\n"""\n\n# why\nx = 1  # what\ny = """a\nb"""\n\n\ndef f():\n    "doc"\n'
    )
    assert python_lines(source) == 4
    assert native_lines("// a\n/* b\n c */\n\nint x; // d\n  }\n") == 2


@pytest.mark.parametrize(
    "package",
    sorted(
        path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "kernel"
    ),
)
def test_the_size_of_a_package_is_what_the_readme_says(package: str) -> None:
    (lines,) = stated(rf"`{package}` ([\d,]+)")
    assert lines == pytest.approx(sum_of((PACKAGE / package).rglob("*")), rel=TOLERANCE)


def test_the_sizes_of_kernels_are_what_the_readme_says() -> None:
    kernel = PACKAGE / "kernel"
    lines = stated(
        r"([\d,]+) of contracts and references, ([\d,]+) of Triton, ([\d,]+) of C\+\+ and CUDA"
    )
    folders = [kernel.glob("*.py"), (kernel / "gpu").rglob("*"), (kernel / "csrc").rglob("*")]
    assert lines == pytest.approx([sum_of(paths) for paths in folders], rel=TOLERANCE)


def test_the_sizes_of_all_are_what_the_readme_says() -> None:
    folders = [PACKAGE.glob("*.py"), PACKAGE.rglob("*"), (ROOT / "tests").rglob("*")]
    lines = stated(r"single files ([\d,]+)") + stated(r"\| ([\d,]+), and ([\d,]+) \|")
    assert lines == pytest.approx([sum_of(paths) for paths in folders], rel=TOLERANCE)


# ---- versions


def test_versions_are_those_that_pip_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch>"))
    least, most = torch.removeprefix("torch>=").split(",<")
    (flashinfer,) = (
        each for each in project["optional-dependencies"]["cuda"] if "flashinfer" in each
    )

    assert f"Python {project['requires-python'].replace('>=', '≥ ')}," in README
    assert f"torch ≥ {least} and < {most}," in README
    assert f"FlashInfer {flashinfer.partition('==')[2]}," in README
