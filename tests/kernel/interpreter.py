"""Repairs Triton's interpreter, if this process has it; to import this module is enough.

The interpreter puts functions of its own into Triton's language. It searches whole modules for
their places, at each launch and at each call of a function in a kernel, for milliseconds. Here it
does so once, and they stay there. It also looks for integers that overflow, but reports them in
debug mode alone; here it does not look.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import triton
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_new_numpy(tensor: type, scope: object) -> None:
    """Make a tensor of one number a loop's bound; numpy no longer takes its array for a number."""
    _patch_tensor(tensor, scope)
    to_index = lambda self: self.handle.data.item()  # noqa: E731 - a method
    scope.set_attr(tensor, "__index__", to_index)  # type: ignore[attr-defined]


def _repair() -> None:
    interpreter._patch_lang_tensor = _patch_tensor_for_new_numpy
    for language in (tl, tl.core):  # as kernels and as Triton's own functions know it
        interpreter._patch_lang(SimpleNamespace(__globals__={"language": language}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


if triton.knobs.runtime.interpret:
    _repair()
