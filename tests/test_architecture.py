"""The shape of the package: who may import whom, sizes, types, exports. Read off the syntax trees."""

from __future__ import annotations

import ast
import importlib
import io
import statistics
import tokenize
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
NUM_LINES = {"server": 2800, "kernel": 1200, "benchmark": 200}  # beside the core
CORE_LINES = 5000
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tier_of(part: str) -> int:
    return next(i for i, tier in enumerate(TIERS) if part in tier)


def imports(tree: ast.AST) -> Iterator[str]:
    """The package's own modules that a file imports at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minisgl."):
            assert node.module
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("minisgl."))
        yield from imports(node)


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return 1 + (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 1


def num_code_lines(source: str) -> int:
    """Lines that hold code: not blank, comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_a_tier(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for module in imports(ast.parse(path.read_text())):
        other = module.split(".")[1]
        assert other == part or (part, other) in WITHIN_A_TIER or tier_of(other) < tier_of(part), module


def test_no_module_is_in_an_import_cycle() -> None:
    known = {".".join(["minisgl", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in FILES}
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}
    graph = {
        name: {module for module in imports(ast.parse(path.read_text())) if module in known}
        for name, path in known.items()
        if path.name != "__init__.py"
    }
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph


def test_nothing_is_global_and_mutable_through_a_global_statement() -> None:
    for path in FILES:
        assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text()))), path


def test_the_package_stays_compact() -> None:
    lines = {path: num_code_lines(path.read_text()) for path in FILES}
    for part, bound in NUM_LINES.items():
        assert sum(num for path, num in lines.items() if part_of(path) == part) < bound, part
    assert sum(num for path, num in lines.items() if part_of(path) not in NUM_LINES) < CORE_LINES


def test_files_and_functions_stay_short() -> None:
    lengths = sorted(code_lines(node) for _, node in functions())
    assert statistics.median(lengths) <= 8
    assert lengths[len(lengths) * 95 // 100] <= 40
    assert max(len(path.read_text().splitlines()) for path in FILES) <= 350


def test_every_public_module_and_class_has_a_docstring() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and part_of(path) != "server":
                assert ast.get_docstring(node), f"{path}: {node.name}"


@pytest.mark.parametrize(
    "package",
    [
        ".".join(path.parent.relative_to(PACKAGE).parts)
        for path in FILES
        if path.name == "__init__.py" and path.parent != PACKAGE
    ],
)
def test_all_names_what_is_there(package: str) -> None:
    module = importlib.import_module(f"minisgl.{package}")
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
