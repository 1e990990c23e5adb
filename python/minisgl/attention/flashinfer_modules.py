"""FlashInfer's kernels of prompts: compiled ahead, and kept.

FlashInfer compiles a module when a kernel is first needed, and again whenever pip has written its
headers anew. Here they are compiled while the weights are loaded, and kept by version in the
cache folder of this project. FlashInfer takes them from there as it takes modules that were
compiled before they were installed ("ahead of time"), without a compiler.

On Hopper the modules that are kept have fewer kernels than FlashInfer's of the same names, see
`hopper_prompts.py`. FlashInfer finds them only in processes that use the folder of this project.
Their compilation starts before FlashInfer is imported, which takes seconds.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minisgl.attention.hopper_prompts import (
    PromptKernels,
    can_compile,
    digest_of_sources,
    find_sources,
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
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"


class _Generated(NamedTuple):
    """What FlashInfer says of the modules.

    Attributes:
        folder: where they are kept; None if they are not.
        include_folders: of headers.
        modules: FlashInfer's, by the kernels of a kind of layers.
    """

    folder: Path | None
    include_folders: list[Path]
    modules: dict[PromptKernels, Any]


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
        self._is_ours = self._backend == "fa3" and can_compile(dtype)
        kinds = {(spec.window is not None, spec.softcap is not None) for spec in specs}
        self._kinds = [PromptKernels(dtype, head_dim, *kind) for kind in sorted(kinds)]

    @property
    def missing(self) -> list[Any]:
        """Those that have to be compiled.

        Raises:
            ConfigError: FlashInfer is not installed.
        """
        return [module for module in self._generated.modules.values() if not module.is_aot]

    @functools.cached_property
    def _generated(self) -> _Generated:
        import_flashinfer()
        from flashinfer.jit import env, gen_batch_prefill_module

        folder = _use_kept_modules(env, digest_of_sources() if self._is_ours else None)
        include_folders = [
            *env.CCCL_INCLUDE_DIRS,
            env.FLASHINFER_INCLUDE_DIR,
            *env.CUTLASS_INCLUDE_DIRS,
        ]
        modules = {}
        for kind in self._kinds:
            modules[kind] = gen_batch_prefill_module(
                self._backend,
                kind.dtype,
                kind.dtype,
                kind.dtype,
                torch.int32,
                kind.head_dim,
                kind.head_dim,
                _NO_ROTATION,
                kind.has_window,
                kind.has_softcap,
                False,
            )
        return _Generated(folder, include_folders, modules)

    def build(self) -> None:
        """Compile what is missing, and keep it.

        Raises:
            ConfigError: FlashInfer is not installed, there is no compiler, or it fails.
        """
        toolkit = find_cuda_toolkit()
        with ThreadPoolExecutor(2 * len(self._kinds)) as pool:
            early = self._start_early(toolkit, pool) if toolkit else {}
            missing = [kind for kind in self._kinds if not self._generated.modules[kind].is_aot]
            if not missing:
                return
            if toolkit is None:
                raise ConfigError(
                    "--attn fi needs CUDA's compiler nvcc, which pip install 'minisgl[cuda]' "
                    "brings; --attn torch needs none"
                )
            let_flashinfer_compile(toolkit.home)
            compile_kind = functools.partial(self._compile, toolkit, early)
            list(pool.map(compile_kind, missing))

    def _start_early(
        self, toolkit: CudaToolkit, pool: ThreadPoolExecutor
    ) -> dict[PromptKernels, Future[Path]]:
        """Start to compile what can be compiled without FlashInfer's word; by kind, the libraries.

        They are kept by names of this project. Another start finds them, and starts nothing.
        """
        sources = find_sources() if self._is_ours else None
        if sources is None:
            return {}
        try:
            folder = make_own_folder(cache_folder() / "kernels" / f"prompts-{sources.digest}")
        except OSError:
            return {}  # `_use_kept_modules` says it
        return {
            kind: pool.submit(_compile_once, kind, toolkit, sources.include_folders, folder)
            for kind in self._kinds
        }

    def _compile(
        self,
        toolkit: CudaToolkit,
        early: dict[PromptKernels, Future[Path]],
        kind: PromptKernels,
    ) -> None:
        folder, include_folders, modules = self._generated
        module = modules[kind]
        place = folder / module.name / f"{module.name}.so" if folder else None
        try:
            if place is None or not self._is_ours:
                module.build(verbose=False)
                library = module.jit_library_path
            elif kind in early:
                library = early[kind].result()
            else:
                place.parent.mkdir(mode=0o700, exist_ok=True)
                kind.compile(toolkit, include_folders, place)
                return
        except RuntimeError as error:
            logger.debug("FlashInfer: %s", error)
            raise ConfigError(
                f"FlashInfer cannot be compiled by {toolkit.nvcc}: {_first_error(error)}; "
                "--attn torch needs no compiler"
            ) from None
        if place is not None:
            _keep(library, place)


def _compile_once(
    kernels: PromptKernels, toolkit: CudaToolkit, include_folders: Sequence[Path], folder: Path
) -> Path:
    library = folder / f"{kernels.name}.so"
    if not is_own_file(library):
        library.unlink(missing_ok=True)
        kernels.compile(toolkit, include_folders, library)
    return library


def _use_kept_modules(env: Any, digest: str | None) -> Path | None:
    """Let FlashInfer look for modules where they are kept.

    Args:
        digest: tells versions of the modules apart that are not just FlashInfer's.

    Returns:
        The folder; None where modules that were installed are used, or where nothing can be kept.
    """
    if env.has_flashinfer_jit_cache():
        return None
    workspace: Path = env.FLASHINFER_WORKSPACE_DIR  # its last folders: version, architecture
    name = f"flashinfer-{workspace.parent.name}-cuda{torch.version.cuda}-sm{workspace.name}"
    if digest is not None:
        name += f"-{digest}"
    try:
        folder = make_own_folder(cache_folder() / "kernels" / name)
    except OSError as error:
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
