"""The kernels of prompts: compiled ahead, and kept by version in the cache folder of this project.

On Hopper they are FlashInfer's FlashAttention 3 as `builds/prompt_attention.py` compiles it;
FlashInfer's Python is not imported for that, since it takes a second.

Elsewhere, and where FlashInfer's headers are not found, they are FlashInfer's own modules. It
compiles one when a kernel is first needed, and again whenever pip has written its headers anew.
Here they are compiled while the weights are loaded. FlashInfer takes them from the folder as it
takes modules that were compiled before they were installed ("ahead of time"), without a compiler.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from minisgl.builds import (
    HOPPER,
    FlashInferSources,
    Library,
    PromptKernels,
    find_flashinfer_sources,
    library_folder,
    prompt_kernels,
)
from minisgl.checkpoint import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.utils.cuda_toolkit import CudaToolkit, find_cuda_toolkit
from minisgl.utils.env import cache_folder, let_flashinfer_compile
from minisgl.utils.ownership import is_own_file, make_own_folder

logger = logging.getLogger(__name__)

_NO_ROTATION = 0  # FlashInfer's PosEncodingMode.NONE


def import_flashinfer() -> Any:
    """
    Raises:
        ConfigError: FlashInfer is not installed.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(
            f"--attn fi needs FlashInfer: pip install 'minisgl[cuda]' ({error})"
        ) from None
    return flashinfer


def prefill_kernels(device: torch.device) -> str:
    """FlashInfer's name of its kernels of prompts for a device: FlashAttention 3 on Hopper."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == HOPPER else "fa2"


class PromptModules:
    """The modules that the prompts of a model need.

    Args:
        specs: the attention of each layer.
        head_dim: the width of a head.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        self._backend = prefill_kernels(device)
        self._kinds = prompt_kernels(_name_of(dtype), head_dim, specs)
        self._hopper = _hopper_libraries(device, dtype)

    @property
    def missing(self) -> list[Any]:
        """The modules or kernels that have to be compiled.

        Raises:
            ConfigError: FlashInfer is not installed.
        """
        if self._hopper is not None:
            return [kind for kind in self._kinds if not self._hopper.has(kind)]
        return [module for module in self._flashinfer.modules if not module.is_aot]

    @functools.cached_property
    def _flashinfer(self) -> _FlashInferModules:
        return _FlashInferModules.of(self._backend, self._kinds)

    def build(self) -> None:
        """Compile what is missing, and keep it.

        Raises:
            ConfigError: FlashInfer is not installed, there is no compiler, or it fails.
        """
        missing = self.missing
        if not missing:
            return
        toolkit = find_cuda_toolkit()
        if toolkit is None:
            raise ConfigError(
                "--attn fi needs CUDA's compiler nvcc, which pip install 'minisgl[cuda]' "
                "brings; --attn triton needs none"
            )
        libraries = self._flashinfer if self._hopper is None else self._hopper
        try:
            with ThreadPoolExecutor(len(missing)) as pool:
                list(pool.map(functools.partial(libraries.compile, toolkit), missing))
        except RuntimeError as error:
            logger.debug("FlashInfer: %s", error)
            raise ConfigError(
                f"FlashInfer cannot be compiled by {toolkit.nvcc}: {_first_error(error)}; "
                "--attn triton needs no compiler"
            ) from None


def load_hopper_module(
    device: torch.device, dtype: torch.dtype, head_dim: int, spec: AttentionSpec
) -> Any | None:
    """Return the functions of a library that `PromptModules.build` compiled for a Hopper GPU.

    Returns:
        None if there is none; then FlashInfer's own module does it.
    """
    libraries = _hopper_libraries(device, dtype)
    (kernels,) = prompt_kernels(_name_of(dtype), head_dim, [spec])
    if libraries is None or not libraries.has(kernels):
        return None
    return tvm_ffi.load_module(str(libraries.path_of(kernels)))


@dataclass(frozen=True, slots=True)
class _HopperLibraries:
    """The libraries that this project compiles: where they are kept, and their sources."""

    folder: Path
    sources: FlashInferSources

    def path_of(self, kernels: PromptKernels) -> Path:
        return self._library(kernels).path_in(self.folder)

    def has(self, kernels: PromptKernels) -> bool:
        return self._library(kernels).is_in(self.folder)

    def compile(self, toolkit: CudaToolkit, kernels: PromptKernels) -> None:
        kernels.library(self.sources, toolkit).make_in(self.folder)

    def _library(self, kernels: PromptKernels) -> Library:
        """The one that is kept, which needs no compiler."""
        return kernels.library(self.sources, None)


def _hopper_libraries(device: torch.device, dtype: torch.dtype) -> _HopperLibraries | None:
    """Find our libraries; None where FlashInfer's own modules are used."""
    sources = find_flashinfer_sources(torch.cuda.get_device_capability(device), _name_of(dtype))
    if sources is None:
        return None
    try:
        folder = library_folder()
    except OSError as error:
        logger.warning("kernels of prompts are not kept: %s", error)
        return None
    return _HopperLibraries(folder, sources)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _FlashInferModules:
    """FlashInfer's own modules.

    Attributes:
        folder: where they are kept; None if they are not.
    """

    folder: Path | None
    modules: list[Any]

    @classmethod
    def of(cls, backend: str, kinds: Sequence[PromptKernels]) -> _FlashInferModules:
        """
        Raises:
            ConfigError: FlashInfer is not installed.
        """
        import_flashinfer()
        from flashinfer.jit import env, gen_batch_prefill_module

        folder = _use_kept_modules(env)
        modules = [
            gen_batch_prefill_module(
                backend,
                *[getattr(torch, kind.dtype)] * 3,
                torch.int32,
                kind.head_dim,
                kind.head_dim,
                _NO_ROTATION,
                kind.has_window,
                kind.has_softcap,
                False,
            )
            for kind in kinds
        ]
        return cls(folder, modules)

    def compile(self, toolkit: CudaToolkit, module: Any) -> None:
        let_flashinfer_compile(toolkit.home)
        module.build(verbose=False)
        if self.folder is not None:
            _keep(module.jit_library_path, self.folder / module.name / f"{module.name}.so")


def _use_kept_modules(env: Any) -> Path | None:
    """Let FlashInfer look for modules where they are kept.

    Returns:
        The folder; None where modules that were installed are used, or where nothing can be kept.
    """
    if env.has_flashinfer_jit_cache():
        return None
    workspace: Path = env.FLASHINFER_WORKSPACE_DIR  # its last folders: version, architecture
    name = f"flashinfer-{workspace.parent.name}-cuda{torch.version.cuda}-sm{workspace.name}"
    try:
        folder = make_own_folder(cache_folder() / "kernels" / name)
    except (OSError, ConfigError) as error:
        logger.warning("FlashInfer's kernels are not kept: %s", error)
        return None
    for library in folder.glob("*/*.so"):
        if not is_own_file(library):
            library.unlink()
    env.FLASHINFER_AOT_DIR = folder
    return folder


def _keep(library: Path, place: Path) -> None:
    """Copy a library under another name, then rename: another process may be loading it."""
    place.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = place.with_name(f"unfinished-{os.getpid()}")
    shutil.copyfile(library, unfinished)
    unfinished.chmod(0o700)
    unfinished.rename(place)


def _first_error(error: RuntimeError) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = str(error).splitlines()
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines)[0].strip()
