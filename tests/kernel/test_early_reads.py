"""What a kernel of a GPU does before it waits for the kernel before it (`kernel/gpu/launch.py`).

On a CPU no kernel starts early, so nothing else could notice a read that comes too soon. Each name
stands here for a reason: it is a weight or a table of the model, or a number of the step that its
first kernels write.
"""

from __future__ import annotations

import ast
from pathlib import Path

from minisgl.kernel import gpu

WAITS = {"wait_for_inputs", "start_next_and_wait"}
WEIGHTS = {"weight", "rows", "q_weight", "k_weight", "cos", "sin"}
NUMBERS_OF_THE_STEP = {"position", "slot", "query", "row", "indptr"}
GROUPS_OF_THE_STEP = {"member", "program"}
# `_route` has chosen the experts, and `_gate_up_rows` has waited for it.
CHOSEN_EXPERTS = {"_down_rows": {"expert"}}
FUNCTIONS = [
    node
    for path in sorted(Path(gpu.__file__).parent.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
]


def called(node: ast.AST) -> str:
    """The name of the function that a call calls; empty for other nodes."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def address(load: ast.Call) -> str:
    """The pointer that a load begins with."""
    names = [node for node in ast.walk(load.args[0]) if isinstance(node, ast.Name)]
    return min(names, key=lambda name: (name.lineno, name.col_offset)).id


def early_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """The calls before the wait; none if the function does not wait."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    waits = [call.lineno for call in calls if called(call) in WAITS]
    return [call for call in calls if call.lineno < min(waits, default=0)]


def early_reads(function: ast.FunctionDef) -> set[str]:
    """The pointers of the loads before the wait."""
    return {address(call) for call in early_calls(function) if called(call) == "tl.load"}


def writes(function: ast.FunctionDef) -> bool:
    return "tl.store" in map(called, ast.walk(function))


def early_returns(function: ast.FunctionDef) -> list[str]:
    """The conditions under which programs of a kernel end without a wait."""
    nodes = list(ast.walk(function))
    waits = [node.lineno for node in nodes if called(node) in WAITS]
    branches = [node for node in nodes if isinstance(node, ast.If)]
    early = [branch for branch in branches if branch.lineno < min(waits, default=0)]
    return [ast.unparse(branch.test) for branch in early if isinstance(branch.body[-1], ast.Return)]


def test_a_program_waits_in_any_case() -> None:
    """Else the kernel after this one would start before the one before it has ended."""
    found = {function.name: early_returns(function) for function in FUNCTIONS}
    conditions = [condition for each in found.values() for condition in each]
    assert found["_attend_part"], "the test finds what returns"
    assert all(condition.startswith("index > 0 and ") for condition in conditions)


def test_each_kernel_that_may_start_early_waits() -> None:
    waits_of = {
        function.name: not WAITS.isdisjoint(map(called, ast.walk(function)))
        for function in FUNCTIONS
        if "PDL" in [argument.arg for argument in function.args.args]
    }
    for name in WAITS:
        assert not waits_of.pop(name)
    assert {"_plan", "_attend_part"} <= waits_of.keys(), "the test finds what may start early"
    assert all(waits_of.values()), waits_of


def test_only_what_no_kernel_just_before_writes_is_read_early() -> None:
    found = {function.name: early_reads(function) for function in FUNCTIONS}
    for name, reads in found.items():
        known = WEIGHTS | NUMBERS_OF_THE_STEP | GROUPS_OF_THE_STEP | CHOSEN_EXPERTS.get(name, set())
        assert reads <= known, name
    assert found["_rotate_and_store"] >= {"position", "slot", "cos"}, "the test finds what is read"


def test_nothing_is_written_early() -> None:
    """The kernels that still run may read or write the same memory."""
    writers = {function.name for function in FUNCTIONS if writes(function)}
    assert "_write_blocks" in writers, "the test finds what writes"
    for function in FUNCTIONS:
        names = {called(call) for call in early_calls(function)}
        assert names.isdisjoint({"tl.store", *writers}), function.name
        assert not any(name.startswith("tl.atomic") for name in names), function.name


def test_only_a_norm_lets_the_next_kernel_start_before_it_waits() -> None:
    """What follows it is a product, or a kernel that reads no result of the kernels before."""
    found = {
        function.name
        for function in FUNCTIONS
        if "start_next_and_wait" in map(called, ast.walk(function))
    }
    assert found == {"_rms_norm"}
