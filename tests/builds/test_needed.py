"""What is compiled ahead is what is loaded later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention import PromptModules
from minisgl.attention.flashinfer import modules as flashinfer_modules
from minisgl.builds import (
    FlashInferSources,
    Library,
    kernels,
    library_folder,
    needed,
    needed_libraries,
    prompt_attention,
)
from minisgl.builds import library as library_module
from minisgl.checkpoint import AttentionSpec
from minisgl.config import EngineConfig
from minisgl.kernel import native
from minisgl.utils import Hardware
from minisgl.utils.cuda_toolkit import CudaToolkit

HOPPER = (9, 0)
FULL = AttentionSpec(scale=0.1)
SLIDING = AttentionSpec(scale=0.1, window=8)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a compiler, which makes files, and with FlashInfer's headers."""

    def compile_(stages: list[list[list[str]]], folder: Path) -> None:
        (folder / stages[-1][0][-1]).write_text("compiled")

    def find_spec(name: str) -> SimpleNamespace | None:
        if name == "flashinfer_jit_cache":
            return None
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / name)])

    for folder in prompt_attention._HEADERS:
        (tmp_path / "flashinfer" / "data" / folder).mkdir(parents=True)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library_module, "run_compilers", compile_)
    monkeypatch.setattr(prompt_attention.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(prompt_attention.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(native.tvm_ffi, "load_module", lambda path: Path(path).name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    install_toolkit(monkeypatch, CudaToolkit(tmp_path / "cuda"))


def install_toolkit(monkeypatch: pytest.MonkeyPatch, toolkit: CudaToolkit | None) -> None:
    for module in (kernels, needed, flashinfer_modules):
        monkeypatch.setattr(module, "find_cuda_toolkit", lambda: toolkit)


def needs(
    specs: Sequence[AttentionSpec] = (FULL,),
    capability: tuple[int, int] | None = HOPPER,
    head_dim: int = 128,
    **options: Any,
) -> list[Library]:
    hardware = Hardware("cuda", has_bf16=True, num_devices=1)
    config = EngineConfig(model="a folder", **options).resolve(hardware)
    model: Any = SimpleNamespace(head_dim=head_dim, attention=list(specs))
    return needed_libraries(config, model, capability)


def kinds(libraries: Sequence[Library]) -> list[str]:
    """Names without digests."""
    return [library.name.rpartition("-")[0] for library in libraries]


def kept() -> set[str]:
    return {path.stem for path in library_folder().glob("*.so")}


@pytest.mark.parametrize("specs", [[FULL], [SLIDING, FULL, SLIDING]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_hopper_all_is_compiled_ahead(dtype: str, specs: list[AttentionSpec]) -> None:
    """The engine finds each library under the name that it has when it is compiled ahead."""
    torch_dtype = getattr(torch, dtype)
    if dtype == "bfloat16":  # as `cuda_kernels_for` asks
        assert native.load_cuda_kernels.__wrapped__(*HOPPER) is not None
    PromptModules(torch.device("cuda:0"), torch_dtype, 128, specs).build()
    assert {library.name for library in needs(specs, dtype=dtype)} == kept()


def test_on_a_cpu_its_kernels_are_compiled_ahead() -> None:
    (library,) = needs(device="cpu", capability=None)
    assert native.load_cpu_kernels.__wrapped__() is not None
    assert {library.name} == kept()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["gpu", "prompts-bfloat16-128"]),
        ({"attn": "fi"}, ["gpu", "prompts-bfloat16-128"]),
        ({"attn": "fi,trtllm"}, ["gpu", "prompts-bfloat16-128"]),
        ({"attn": "fa,fi"}, ["gpu"]),
        ({"attn": "torch"}, ["gpu"]),
        ({"dtype": "float16"}, ["prompts-float16-128"]),
        ({"dtype": "float32"}, []),
    ],
)
def test_what_is_needed_follows_from_the_options(
    options: dict[str, Any], expected: list[str]
) -> None:
    assert kinds(needs(**options)) == expected


def test_elsewhere_than_on_hopper_flashinfer_compiles_its_own_modules() -> None:
    assert kinds(needs(capability=(8, 0))) == ["gpu"]


def test_for_heads_that_flashinfer_does_not_take_no_prompts_kernels_are_compiled() -> None:
    assert kinds(needs(head_dim=80)) == ["gpu"]
    assert kinds(needs(head_dim=256)) == ["gpu", "prompts-bfloat16-256"]


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    install_toolkit(monkeypatch, None)
    assert needs() == []


def test_where_flashinfers_headers_are_missing_its_module_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needed, "find_flashinfer_sources", lambda capability, dtype: None)
    assert kinds(needs()) == ["gpu"]


def test_a_name_tells_libraries_apart(tmp_path: Path) -> None:
    sources = FlashInferSources([tmp_path], "0")
    names = {library.name for library in needs([FULL, SLIDING])}
    names |= {kernels.cuda_library((8, 0)).name, kernels.cuda_library((9, 0)).name}
    names |= {
        prompt_attention.PromptKernels("bfloat16", 64, has_window=False, has_softcap=True)
        .library(sources, None)
        .name
    }
    assert len(names) == 5
