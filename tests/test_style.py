"""One idea a line, read off the syntax trees: what a formatter and a linter do not say.

Each rule is a function from a syntax node to whether the node breaks it. The rules hold for the package, its tests and
its benchmarks alike.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for part in ("python", "tests", "benchmark")
    for path in sorted((ROOT / part).rglob("*.py"))
]
EMPTY = (ast.Constant, ast.List, ast.Dict, ast.Set)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_tuple_packing(node: ast.AST) -> bool:
    """Several assignments in one, other than a swap or take-and-clear (`taken, self.x = self.x, None`)."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not any(isinstance(target, ast.Tuple) for target in node.targets):
        return False
    [targets] = [target for target in node.targets if isinstance(target, ast.Tuple)]
    names = [ast.unparse(target) for target in targets.elts]
    values = [ast.unparse(value) for value in node.value.elts]
    if sorted(names) == sorted(values):
        return False
    others = [value for value in node.value.elts if ast.unparse(value) not in names]
    is_take_and_clear = len(others) < len(values) and all(
        isinstance(other, EMPTY) for other in others
    )
    return not is_take_and_clear


def is_wide_conditional(node: ast.AST) -> bool:
    """A conditional expression over several lines, or with another one in it."""
    if not isinstance(node, ast.IfExp):
        return False
    inner = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
    return node.lineno != node.end_lineno or len(inner) > 1


def is_filtered_twice(node: ast.AST) -> bool:
    """A comprehension with two conditions, written with two ifs or with `and` and `or`."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    conditions = [test for generator in node.generators for test in generator.ifs]
    return len(conditions) > 1 or any(isinstance(test, ast.BoolOp) for test in conditions)


def is_formula(node: ast.AST) -> bool:
    """An assertion of several facts at once."""
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.BoolOp)


RULES: list[Callable[[ast.AST], bool]] = [
    is_tuple_packing,
    is_wide_conditional,
    is_filtered_twice,
    is_formula,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_one_idea_a_line(rule: Callable[[ast.AST], bool]) -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.stmt | ast.expr)
        if rule(node)
    ]

    assert broken == []
