"""The kernels of prompts are compiled once and kept. FlashInfer itself is a stand-in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention.flashinfer import modules as flashinfer_modules
from minisgl.attention.flashinfer.modules import PromptModules, load_hopper_module
from minisgl.builds import FlashInferSources, find_flashinfer_sources, prompt_attention
from minisgl.checkpoint import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.utils.cuda_toolkit import CudaToolkit

# Writes down its arguments and makes what it is asked to make.
NVCC = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo a library > "$2"
    shift
done
"""
FAILING_NVCC = """#!/bin/sh
echo 'x.cuh(7): warning: unused
x.cu(3): error: no such thing' >&2
exit 1
"""
FULL = AttentionSpec(scale=0.1)
SLIDING = AttentionSpec(scale=0.1, window=8)


@dataclass
class FakeModule:
    """As `flashinfer.jit.core.JitSpec` of 0.6."""

    env: Any
    name: str

    @property
    def jit_library_path(self) -> Path:
        return Path(self.env.FLASHINFER_WORKSPACE_DIR / "cached_ops" / f"{self.name}.so")

    @property
    def is_aot(self) -> bool:
        return Path(self.env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so").exists()

    def build(self, verbose: bool) -> None:
        if self.env.failure:
            raise RuntimeError(self.env.failure)
        self.env.built.append(self.name)
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_text("a library")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The settings of the stand-in."""
    env = SimpleNamespace(
        FLASHINFER_WORKSPACE_DIR=tmp_path / "0.6.12" / "90a",
        FLASHINFER_AOT_DIR=tmp_path / "site-packages",
        FLASHINFER_INCLUDE_DIR=tmp_path / "include",
        CUTLASS_INCLUDE_DIRS=[tmp_path / "cutlass"],
        CCCL_INCLUDE_DIRS=[tmp_path / "cccl"],
        has_flashinfer_jit_cache=lambda: False,
        built=[],
        failure="",
    )

    def generate(kernels: str, *about: Any) -> FakeModule:
        *_, has_window, has_softcap, _fp16 = about
        return FakeModule(env, f"{kernels}_{has_window}_{has_softcap}")

    jit = ModuleType("flashinfer.jit")
    vars(jit).update(env=env, gen_batch_prefill_module=generate)
    package = ModuleType("flashinfer")
    vars(package).update(jit=jit, __path__=[])
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", lambda: CudaToolkit(tmp_path))
    monkeypatch.setattr(
        flashinfer_modules, "find_flashinfer_sources", lambda capability, dtype: None
    )
    return env


@pytest.fixture
def hopper(env: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Hopper GPU, FlashInfer's headers, and a stand-in for the compiler.

    Returns:
        Where the arguments of each call are, a line each.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def find(capability: tuple[int, int], dtype: str) -> FlashInferSources | None:
        return None if dtype == "float32" else sources_in(tmp_path)

    monkeypatch.setattr(flashinfer_modules, "find_flashinfer_sources", find)
    log = tmp_path / "nvcc.log"
    log.touch()
    install_nvcc(tmp_path, NVCC.format(log=log))
    return log


def sources_in(folder: Path) -> FlashInferSources:
    return FlashInferSources([folder / "headers"], prompt_attention._digest_with("0.6.12"))


def libraries(tmp_path: Path) -> set[str]:
    """Without their digests."""
    files = (tmp_path / "cache").rglob("*.so")
    return {file.name.rpartition("-")[0].removeprefix("prompts-") for file in files}


def install_nvcc(home: Path, script: str) -> None:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(exist_ok=True)
    nvcc.write_text(script)
    nvcc.chmod(0o700)


def modules(*specs: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> PromptModules:
    return PromptModules(torch.device("cuda:0"), dtype, 128, specs)


def test_each_kind_of_layer_is_compiled_once(env: Any) -> None:
    modules(FULL, SLIDING, FULL, SLIDING).build()
    assert sorted(env.built) == ["fa2_False_False", "fa2_True_False"]


def test_what_is_kept_is_not_compiled_again_whatever_pip_does(env: Any) -> None:
    modules(FULL).build()
    for path in env.FLASHINFER_WORKSPACE_DIR.glob("*/*"):
        path.unlink()
    assert not modules(FULL).missing
    modules(FULL, SLIDING).build()
    assert env.built == ["fa2_False_False", "fa2_True_False"]


def test_another_version_is_compiled_anew(env: Any, tmp_path: Path) -> None:
    modules(FULL).build()
    env.FLASHINFER_WORKSPACE_DIR = tmp_path / "0.6.13" / "90a"
    modules(FULL).build()
    assert len(env.built) == 2


def test_a_library_that_others_can_write_is_not_used(env: Any) -> None:
    modules(FULL).build()
    (library,) = env.FLASHINFER_AOT_DIR.glob("*/*.so")
    library.chmod(0o777)
    assert modules(FULL).missing
    assert not library.exists()


def test_modules_that_were_installed_are_used(env: Any, tmp_path: Path) -> None:
    env.has_flashinfer_jit_cache = lambda: True
    installed = tmp_path / "site-packages" / "fa2_False_False" / "fa2_False_False.so"
    installed.parent.mkdir(parents=True)
    installed.touch()
    modules(FULL).build()
    assert not env.built


def test_without_a_compiler_the_error_says_how_to_get_one(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", lambda: None)
    with pytest.raises(ConfigError, match=r"--attn fi needs .*nvcc.*pip install"):
        modules(FULL).build()


def test_of_a_compilers_output_the_error_is_told(env: Any, tmp_path: Path) -> None:
    env.failure = "Ninja build failed. Ninja output:\n[1/9] nvcc\nx.cu(3): error: no such thing\nx"
    with pytest.raises(ConfigError) as raised:
        modules(FULL).build()
    assert str(raised.value) == (
        f"FlashInfer cannot be compiled by {tmp_path}/bin/nvcc: x.cu(3): error: no such thing; "
        "--attn triton needs no compiler"
    )


def test_on_hopper_the_two_kernels_of_a_model_are_compiled_and_not_flashinfers_module(
    env: Any, hopper: Path, tmp_path: Path
) -> None:
    modules(AttentionSpec(scale=0.1, softcap=30.0)).build()
    assert not env.built
    *compiled, linked = hopper.read_text().splitlines()
    made = {line.split(" -o ")[1] for line in compiled}
    objects = {"launch.o", "plan.o", "entry.o"}
    assert made == {"paged.cubin", "ragged.cubin", *objects}
    assert "-shared" in linked
    assert objects < set(linked.split())
    for line in compiled:
        assert "-DPROMPT_TYPE=cutlass::bfloat16_t -DPROMPT_HEAD_DIM=128" in line
        assert "-DPROMPT_HAS_WINDOW=0 -DPROMPT_HAS_SOFTCAP=1" in line
        # Ours stand in for those of CUTLASS, so they are found first.
        assert line.index("csrc/hopper/light") < line.index(f"-I{tmp_path}/headers")


def test_on_hopper_each_kind_of_layer_is_compiled_once_and_kept(
    hopper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer is not imported for that, which takes a second."""
    monkeypatch.setattr(flashinfer_modules, "import_flashinfer", None)
    modules(FULL, SLIDING, FULL).build()
    calls = hopper.read_text().splitlines()
    assert len(calls) == 2 * 6
    assert libraries(tmp_path) == {"bfloat16-128", "bfloat16-128-window"}

    assert not modules(FULL, SLIDING).missing
    modules(FULL, SLIDING).build()
    assert hopper.read_text().splitlines() == calls


def test_what_is_kept_on_hopper_is_used_until_our_sources_change(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules(FULL).build()
    sources = tmp_path / "sources"
    shutil.copytree(prompt_attention._SOURCES, sources)
    monkeypatch.setattr(prompt_attention, "_SOURCES", sources)
    assert not modules(FULL).missing
    with (sources / "prompts.cuh").open("a") as file:
        file.write("// changed")
    assert modules(FULL).missing


def test_what_others_can_write_is_not_used_on_hopper(hopper: Path, tmp_path: Path) -> None:
    modules(FULL).build()
    (library,) = (tmp_path / "cache").rglob("*.so")
    library.chmod(0o777)
    assert modules(FULL).missing
    modules(FULL).build()
    assert not modules(FULL).missing


def test_a_compiler_that_is_killed_on_hopper_is_told(hopper: Path, tmp_path: Path) -> None:
    install_nvcc(tmp_path, "#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(ConfigError, match="nvcc ends with -9 and says nothing"):
        modules(FULL).build()


def test_what_another_process_compiles_meanwhile_is_not_compiled_again_on_hopper(
    env: Any, hopper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_slowly() -> CudaToolkit:
        monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", lambda: CudaToolkit(tmp_path))
        modules(FULL).build()  # by the other process
        install_nvcc(tmp_path, "#!/bin/sh\nexit 1\n")
        return CudaToolkit(tmp_path)

    monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", find_slowly)
    modules(FULL).build()
    assert not modules(FULL).missing


def test_on_hopper_layers_find_what_was_compiled_for_them(
    hopper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_modules.tvm_ffi, "load_module", lambda path: Path(path).name)
    modules(FULL).build()

    def load(spec: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> Any:
        return load_hopper_module(torch.device("cuda:0"), dtype, 128, spec)

    assert load(FULL).startswith("prompts-bfloat16-128-")
    assert load(SLIDING) is None, "it was not compiled"
    assert load(FULL, torch.float32) is None, "FlashInfer computes it"


def test_the_headers_are_those_of_the_package_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {"flashinfer": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    versions = {"apache-tvm-ffi": "0.1"}

    def find_version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def find() -> FlashInferSources | None:
        return find_flashinfer_sources((9, 0), "bfloat16")

    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    monkeypatch.setattr(importlib.metadata, "version", find_version)
    assert find() is None, "that is no distribution"

    versions["flashinfer-python"] = "0.6.12"
    assert find() is None, "it has no headers"

    for folder in prompt_attention._HEADERS:
        (tmp_path / "data" / folder).mkdir(parents=True)
    sources = find()
    assert sources
    assert sources.include_folders[-1] == tmp_path / "data/cutlass/tools/util/include"
    assert find_flashinfer_sources((9, 0), "float16") == sources
    assert find_flashinfer_sources((9, 0), "float32") is None, "our kernels do not take it"
    assert find_flashinfer_sources((8, 0), "bfloat16") is None, "that is not Hopper"

    versions["flashinfer-python"] = "0.6.13"
    other = find()
    assert other
    assert other.digest != sources.digest

    found["flashinfer_jit_cache"] = found["flashinfer"]
    assert find() is None, "it has its modules"


def test_numbers_that_our_kernels_do_not_take_are_left_to_flashinfer(
    env: Any, hopper: Path
) -> None:
    modules(FULL, dtype=torch.float32).build()
    assert env.built == ["fa3_False_False"]
    assert not hopper.read_text()


def test_where_nothing_can_be_kept_flashinfer_compiles_its_own_module(
    env: Any, hopper: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file"))
    modules(FULL).build()
    assert env.built == ["fa3_False_False"]
    assert not hopper.read_text()


def test_of_the_output_of_hoppers_compiler_the_error_is_told(hopper: Path, tmp_path: Path) -> None:
    install_nvcc(tmp_path, FAILING_NVCC)
    with pytest.raises(ConfigError, match=r"nvcc: x\.cu\(3\): error: no such thing; --attn"):
        modules(FULL).build()
    assert not libraries(tmp_path)
    assert modules(FULL).missing
