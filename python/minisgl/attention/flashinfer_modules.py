"""FlashInfer's kernels of prompts: compiled ahead, and kept.

FlashInfer compiles a module when a kernel is first needed, and again whenever pip has written its
headers anew. Here they are compiled while the weights are loaded, and kept by version in the
cache folder of this project. FlashInfer takes them from there as it takes modules that were
compiled before they were installed ("ahead of time"), without a compiler.

On Hopper the modules that are kept have fewer kernels than FlashInfer's of the same names, see
`hopper_prompts.py`. FlashInfer finds them only in processes that use the folder of this project.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from minisgl.attention.hopper_prompts import PromptKernels, can_compile, digest_of_sources
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


class PromptModules:
    """The modules that the prompts of a model need.

    Args:
        specs: the attention of each layer.
        head_dim: the width of a head.

    Raises:
        ConfigError: FlashInfer is not installed.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        import_flashinfer()
        from flashinfer.jit import env, gen_batch_prefill_module

        backend = prefill_kernels(device)
        is_ours = backend == "fa3" and can_compile(dtype)
        self._folder = _use_kept_modules(env, digest_of_sources() if is_ours else None)
        self._include_folders = [
            *env.CCCL_INCLUDE_DIRS,
            env.FLASHINFER_INCLUDE_DIR,
            *env.CUTLASS_INCLUDE_DIRS,
        ]
        self._modules: list[Any] = []
        self._ours: dict[str, PromptKernels] = {}  # by the module's name
        kinds = {(spec.window is not None, spec.softcap is not None) for spec in specs}
        for has_window, has_softcap in sorted(kinds):
            module = gen_batch_prefill_module(
                backend,
                dtype,
                dtype,
                dtype,
                torch.int32,
                head_dim,
                head_dim,
                _NO_ROTATION,
                has_window,
                has_softcap,
                False,
            )
            self._modules.append(module)
            if is_ours and self._folder is not None:
                kernels = PromptKernels(dtype, head_dim, has_window, has_softcap)
                self._ours[module.name] = kernels

    @property
    def missing(self) -> list[Any]:
        """Those that have to be compiled."""
        return [module for module in self._modules if not module.is_aot]

    def build(self) -> None:
        """Compile what is missing, and keep it.

        Raises:
            ConfigError: there is no compiler, or it fails.
        """
        missing = self.missing
        if not missing:
            return
        toolkit = find_cuda_toolkit()
        if toolkit is None:
            raise ConfigError(
                "--attn fi needs CUDA's compiler nvcc, which pip install 'minisgl[cuda]' brings; "
                "--attn torch needs none"
            )
        let_flashinfer_compile(toolkit.home)
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda module: self._compile(module, toolkit), missing))

    def _compile(self, module: Any, toolkit: CudaToolkit) -> None:
        ours = self._ours.get(module.name)
        try:
            if ours is None:
                module.build(verbose=False)
            else:
                assert self._folder is not None
                folder = self._folder / module.name
                folder.mkdir(mode=0o700, exist_ok=True)
                ours.compile(toolkit, self._include_folders, folder / f"{module.name}.so")
        except RuntimeError as error:
            logger.debug("FlashInfer: %s", error)
            raise ConfigError(
                f"FlashInfer cannot be compiled by {toolkit.nvcc}: {_first_error(error)}; "
                "--attn torch needs no compiler"
            ) from None
        if ours is None and self._folder is not None:
            _keep(module.jit_library_path, self._folder / module.name)


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


def _keep(library: Path, folder: Path) -> None:
    """Copy a library under another name, then rename: another process may be loading it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder / f"unfinished-{os.getpid()}"
    shutil.copyfile(library, unfinished)
    unfinished.chmod(0o700)
    unfinished.rename(folder / library.name)


def _first_error(error: RuntimeError) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = str(error).splitlines()
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines)[0].strip()
