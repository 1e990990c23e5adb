"""One idea a line: rules that no formatter or linter knows, read off the syntax trees.

Each rule is a function from a syntax node to whether the node breaks it. The rules hold for the
package, its tests and its benchmarks.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
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
    """Several assignments in one; a swap and `taken, self.x = self.x, None` are none."""
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


def is_splat_of_a_temporary(node: ast.AST) -> bool:
    """A function that puts values into a tuple only to splat it into one call."""
    if not isinstance(node, ast.FunctionDef):
        return False
    packed = set()
    splat = set()
    num_uses: Counter[str] = Counter()
    for inner in ast.walk(node):
        match inner:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple()):
                packed.add(name)
            case ast.Starred(value=ast.Name(id=name)):
                splat.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                num_uses[name] += 1
    return any(num_uses[name] == 1 for name in packed & splat)


RULES: list[Callable[[ast.AST], bool]] = [
    is_tuple_packing,
    is_wide_conditional,
    is_filtered_twice,
    is_formula,
    is_splat_of_a_temporary,
]


@pytest.fixture(scope="module")
def broken() -> dict[str, list[str]]:
    """The places that break each rule, by its name; each file is read once."""
    places: dict[str, list[str]] = {rule.__name__: [] for rule in RULES}
    for path in FILES:
        for node in statements_and_expressions(path):
            for rule in RULES:
                if rule(node):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
                    places[rule.__name__].append(place)
    return places


def statements_and_expressions(path: Path) -> Iterator[ast.stmt | ast.expr]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt | ast.expr):
            yield node


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_one_idea_a_line(rule: Callable[[ast.AST], bool], broken: dict[str, list[str]]) -> None:
    assert broken[rule.__name__] == []


def test_no_example_of_a_property_has_a_time_limit() -> None:
    """A loaded machine would break it."""
    assert hypothesis.settings.default.deadline is None
