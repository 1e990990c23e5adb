"""The shape of the package: who may import whom, functions, exports. Read off the syntax trees."""

from __future__ import annotations

import ast
import importlib
import itertools
import statistics
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import minisgl

PACKAGE = Path(minisgl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PROJECT = PACKAGE.parent.parent / "pyproject.toml"
SUBPACKAGES = [
    ".".join(path.parent.relative_to(PACKAGE).parts) for path in PACKAGE.glob("*/**/__init__.py")
]
TIERS = [
    {
        "version",
        "core",
        "config",
        "sampling_params",
        "schemas",
        "errors",
        "utils",
        "processes",
        "worker_info",
    },
    {"checkpoint", "rank_counts", "builds", "distributed", "grammar", "message", "kernel"},
    {"layers", "attention", "kvcache", "moe"},
    {"models"},
    {"engine", "scheduler"},
    {"rank_process", "server", "tokenizer", "llm", "benchmark"},
]
WITHIN_A_TIER = {
    ("core", "errors"),
    ("core", "sampling_params"),
    ("config", "errors"),
    ("config", "utils"),
    ("sampling_params", "errors"),
    ("sampling_params", "schemas"),
    ("schemas", "errors"),
    ("sampling_params", "utils"),
    ("utils", "errors"),
    ("processes", "errors"),
    ("processes", "utils"),
    ("message", "core"),
    ("builds", "checkpoint"),
    ("grammar", "checkpoint"),
    ("rank_counts", "checkpoint"),
    ("kernel", "builds"),
    ("distributed", "kernel"),
    ("layers", "attention"),
    ("layers", "kvcache"),
    ("layers", "moe"),
    ("attention", "kvcache"),
    ("scheduler", "engine"),
    ("server", "tokenizer"),
    ("llm", "tokenizer"),
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tier_of(part: str) -> int:
    return next(i for i, tier in enumerate(TIERS) if part in tier)


def imports(tree: ast.AST) -> Iterator[str]:
    """The package's own modules that a file imports, be it only for the type checker."""
    for node in ast.iter_child_nodes(tree):
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_a_tier(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for module in imports(ast.parse(path.read_text())):
        other = module.split(".")[1]
        is_allowed = (
            other == part or (part, other) in WITHIN_A_TIER or tier_of(other) < tier_of(part)
        )
        assert is_allowed, module


# Packages of what is imported, where they have other names, or bring it with them.
PACKAGES = {
    "_typeshed": "mypy",
    "flash_attn": "flash-attn-4",
    "flash_attn_interface": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic_core": "pydantic",
    "requests": "opentelemetry-exporter-otlp-proto-http",
    "tvm_ffi": "apache-tvm-ffi",
    "urllib3": "opentelemetry-exporter-otlp-proto-http",
    "zmq": "pyzmq",
}


def test_what_is_imported_is_asked_for_by_name() -> None:
    """What another package brings with it may be older than what is used of it here."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    asked = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {package.partition("[")[0].partition(">")[0].partition("=")[0] for package in asked}
    roots = {
        module.partition(".")[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        for module in modules_of(node)
    }
    foreign = roots - sys.stdlib_module_names - {"minisgl"}
    assert {"starlette", "pydantic_core", "flashinfer"} <= foreign, (
        "the test finds what is imported"
    )
    assert {name for name in foreign if PACKAGES.get(name, name) not in names} == set()


def modules_of(node: ast.AST) -> list[str]:
    """Those that a node imports."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_no_module_is_in_an_import_cycle() -> None:
    known = {
        ".".join(["minisgl", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in FILES
    }
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}
    graph = {
        name: set(imported_files(ast.parse(path.read_text()), known)) - {name}
        for name, path in known.items()
    }
    assert "minisgl.kernel.gpu" in graph["minisgl.kernel.dispatch"], "also within a function"
    assert not cycles_of(graph)


def imported_files(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules and packages that a file imports, also as names of a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_folders_of_the_server_are_in_no_import_cycle() -> None:
    """What lies in `server/` itself is in no folder: the endpoints use it, and it starts HTTP."""
    server = PACKAGE / "server"
    folders = {path.name for path in server.iterdir() if (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {}
    for folder in folders:
        trees = [ast.parse(path.read_text()) for path in (server / folder).rglob("*.py")]
        modules = {module for tree in trees for module in imports(tree)}
        graph[folder] = {
            other
            for other in folders - {folder}
            if any(f"{module}.".startswith(f"minisgl.server.{other}.") for module in modules)
        }

    assert not cycles_of(graph)


def cycles_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What remains of a graph without what leads to no cycle."""
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    return graph


def test_nothing_is_global_and_mutable_through_a_global_statement() -> None:
    for path in FILES:
        assert not any(
            isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text()))
        ), path


def test_functions_stay_short() -> None:
    lengths = sorted(code_lines(node) for _, node in functions())
    assert statistics.median(lengths) <= 6
    assert lengths[len(lengths) * 95 // 100] <= 25


def test_every_public_module_and_class_has_a_docstring() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and part_of(path) != "server"
            ):
                assert ast.get_docstring(node), f"{path}: {node.name}"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_all_names_what_is_there(package: str) -> None:
    module = importlib.import_module(f"minisgl.{package}")
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
