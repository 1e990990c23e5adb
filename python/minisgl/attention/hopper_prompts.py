"""Compiles FlashInfer's FlashAttention 3 for the prompts of one model (kernel/csrc/hopper).

FlashInfer's own module has all masks and two schedulers of work, and its sources include the
GEMMs of CUTLASS: a compiler takes minutes of work for what a model does not use. Here each of the
two kernels that it does use is a source, compiled beside the other and beside what starts them,
which is cut so that no part takes longer than a kernel. The products and the softmax are
FlashInfer's. What loads tiles and writes them is ours, since its templates took two thirds of a
compiler's time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tvm_ffi import libinfo

import minisgl.kernel
from minisgl.utils.cuda_toolkit import CudaToolkit

_SOURCES = Path(minisgl.kernel.__file__).parent / "csrc" / "hopper"
_KERNELS = ("paged.cu", "ragged.cu")
_HOST_SOURCES = ("launch.cu", "plan.cu", "entry.cpp")
_FLAGS = ["-std=c++17", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr"]
_FLAGS += ["-gencode=arch=compute_90a,code=sm_90a"]
_KERNEL_FLAGS = ["-O3", "-w", "-cubin"]  # the warnings are about FlashInfer's headers
# What starts the kernels is not worth a long compilation.
_HOST_FLAGS = ["-O1", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-c"]
# As `flashinfer.jit.env` names them, inside the package.
_HEADERS = ["cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include"]
_HEADERS += ["cutlass/include", "cutlass/tools/util/include"]
_ELEMENTS = {torch.bfloat16: "cutlass::bfloat16_t", torch.float16: "cutlass::half_t"}


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """The kernels of prompts for layers of one kind.

    Attributes:
        dtype: one of which `can_compile` is true.
        head_dim: 64, 128 or 256.
    """

    dtype: torch.dtype
    head_dim: int
    has_window: bool
    has_softcap: bool

    @property
    def name(self) -> str:
        """Of the library."""
        kind = f"{self.dtype}-{self.head_dim}".removeprefix("torch.")
        kind += "-window" if self.has_window else ""
        return kind + ("-softcap" if self.has_softcap else "")

    def compile(self, toolkit: CudaToolkit, include_folders: Sequence[Path], library: Path) -> None:
        """Write the library, at once: another process may be loading it.

        Args:
            include_folders: FlashInfer's headers and those that it brings along.
            library: where the functions go that `prompt_attention.py` calls.

        Raises:
            RuntimeError: a compiler fails; the message is what it wrote.
        """
        nvcc = str(toolkit.nvcc)
        ffi_folders = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        folders = [_SOURCES / "light", *include_folders, *ffi_folders]
        options = [*_FLAGS, *self._definitions(), *(f"-I{folder}" for folder in folders)]
        ffi_folder = Path(libinfo.find_libtvm_ffi()).parent
        link_options = [f"-L{toolkit.home / 'lib64'}", f"-L{ffi_folder}", "-ltvm_ffi"]
        commands = [
            [nvcc, *options, *_KERNEL_FLAGS, str(_SOURCES / name), "-o", _made_of(name, "cubin")]
            for name in _KERNELS
        ]
        commands += [
            [nvcc, *options, *_HOST_FLAGS, str(_SOURCES / name), "-o", _made_of(name, "o")]
            for name in _HOST_SOURCES
        ]
        objects = [_made_of(name, "o") for name in _HOST_SOURCES]
        link = [nvcc, "-shared", *objects, str(_SOURCES / "cubins.S"), "-o", "prompts.so"]
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            with ThreadPoolExecutor(len(commands)) as pool:
                list(pool.map(lambda command: _run(command, scratch), commands))
            _run([*link, *link_options], scratch)
            made = Path(scratch) / "prompts.so"
            made.chmod(0o700)
            made.rename(library)

    def _definitions(self) -> list[str]:
        values = {
            "PROMPT_TYPE": _ELEMENTS[self.dtype],
            "PROMPT_HEAD_DIM": self.head_dim,
            "PROMPT_HAS_WINDOW": int(self.has_window),
            "PROMPT_HAS_SOFTCAP": int(self.has_softcap),
        }
        return [f"-D{name}={value}" for name, value in values.items()]


@dataclass(frozen=True, slots=True)
class Sources:
    """What the kernels are compiled from.

    Attributes:
        include_folders: FlashInfer's headers and those that it brings along.
        digest: identifies these sources and ours.
    """

    include_folders: list[Path]
    digest: str


def find_sources() -> Sources | None:
    """Find the headers of the FlashInfer that is installed, without importing it.

    Returns:
        None if it is not there, or has its modules compiled already.
    """
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("flashinfer")
    if spec is None:
        return None
    for location in spec.submodule_search_locations or []:
        folders = [Path(location) / "data" / folder for folder in _HEADERS]
        if all(folder.is_dir() for folder in folders):
            return Sources(folders, f"{version}-cuda{torch.version.cuda}-{_digest_of_sources()}")
    return None


def can_compile(dtype: torch.dtype) -> bool:
    """Whether there are kernels of prompts for numbers of this type."""
    return dtype in _ELEMENTS


def _digest_of_sources() -> str:
    """Identify what is compiled here, beside FlashInfer's version and the model."""
    files = sorted(file for file in _SOURCES.rglob("*") if file.is_file())
    text = "\n".join([*(file.read_text() for file in files), *_FLAGS, *_KERNEL_FLAGS, *_HOST_FLAGS])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _made_of(source: str, kind: str) -> str:
    """The name of what a source is compiled to."""
    return f"{Path(source).stem}.{kind}"


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        # One that is killed says nothing.
        silent = f"{command[0]} ends with {done.returncode} and says nothing"
        raise RuntimeError(done.stderr or done.stdout or silent)
