"""Compiles FlashInfer's FlashAttention 3 for the prompts of one model (kernel/csrc/hopper).

FlashInfer's own module has all masks and two schedulers of work, and its sources include the GEMMs
of CUTLASS: compiling these parts, which a model does not use, takes minutes. Here each of the two
kernels that a model does use is a source of its own. The code that starts them is divided so that
no part takes longer to compile than a kernel. All are compiled in parallel. The products and the
softmax are FlashInfer's. The code that loads and stores tiles is ours, because the templates of
FlashInfer's took two thirds of the compiler's time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minisgl.builds.library import Library, digest_of, ffi_include_options, ffi_link_options
from minisgl.checkpoint import AttentionSpec
from minisgl.utils.cuda_toolkit import CudaToolkit

HOPPER = 9  # major number of its compute capability
PROMPT_HEAD_DIMS = (64, 128, 256)  # widths of heads that FlashInfer's kernels of prompts take

_SOURCES = Path(__file__).parents[1] / "kernel" / "csrc" / "hopper"
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
_ELEMENTS = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t"}  # by dtype


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """The kernels for prompts, in layers of one kind.

    Attributes:
        dtype: bfloat16 or float16.
        head_dim: of `PROMPT_HEAD_DIMS`.
    """

    dtype: str
    head_dim: int
    has_window: bool
    has_softcap: bool

    @property
    def name(self) -> str:
        """A name that distinguishes them from those of other layers."""
        kind = f"{self.dtype}-{self.head_dim}"
        kind += "-window" if self.has_window else ""
        return kind + ("-softcap" if self.has_softcap else "")

    def library(self, sources: FlashInferSources, toolkit: CudaToolkit | None) -> Library:
        """The library with the functions that `attention/flashinfer/prompts.py` calls.

        Args:
            sources: found by `find_flashinfer_sources`.
        """
        folders = [_SOURCES / "light", *sources.include_folders]
        options = [*_FLAGS, *self._definitions(), *(f"-I{folder}" for folder in folders)]
        options += ffi_include_options()
        compilations = [
            [*options, *_KERNEL_FLAGS, str(_SOURCES / name), "-o", _made_of(name, "cubin")]
            for name in _KERNELS
        ]
        compilations += [
            [*options, *_HOST_FLAGS, str(_SOURCES / name), "-o", _made_of(name, "o")]
            for name in _HOST_SOURCES
        ]
        objects = [_made_of(name, "o") for name in _HOST_SOURCES]
        linking = ["-shared", *objects, str(_SOURCES / "cubins.S")]
        linking += [] if toolkit is None else [f"-L{toolkit.home / 'lib64'}"]
        return Library(
            name=f"prompts-{self.name}-{sources.digest}",
            compiler=None if toolkit is None else str(toolkit.nvcc),
            compilations=compilations,
            linking=[*linking, *ffi_link_options()],
        )

    def _definitions(self) -> list[str]:
        values = {
            "PROMPT_TYPE": _ELEMENTS[self.dtype],
            "PROMPT_HEAD_DIM": self.head_dim,
            "PROMPT_HAS_WINDOW": int(self.has_window),
            "PROMPT_HAS_SOFTCAP": int(self.has_softcap),
        }
        return [f"-D{name}={value}" for name, value in values.items()]


@dataclass(frozen=True, slots=True)
class FlashInferSources:
    """FlashInfer's headers, and a digest of all that the kernels are compiled from.

    Attributes:
        include_folders: FlashInfer's headers and those that it brings along.
        digest: identifies these sources and ours.
    """

    include_folders: list[Path]
    digest: str


def find_flashinfer_sources(capability: tuple[int, int], dtype: str) -> FlashInferSources | None:
    """Find the headers of the FlashInfer that is installed, without importing it.

    Returns:
        None where our kernels are not used: FlashInfer's own modules are compiled already, or it
        is not installed, or the GPU is not Hopper, or our kernels do not take the dtype.
    """
    if capability[0] != HOPPER or dtype not in _ELEMENTS:
        return None
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
            return FlashInferSources(folders, _digest_with(version))
    return None


def prompt_kernels(
    dtype: str, head_dim: int, specs: Iterable[AttentionSpec]
) -> list[PromptKernels]:
    """The distinct kernels for prompts, in layers of these specs."""
    kinds = {
        PromptKernels(dtype, head_dim, spec.window is not None, spec.softcap is not None)
        for spec in specs
    }
    return sorted(kinds, key=lambda kind: kind.name)


def _digest_with(flashinfer_version: str) -> str:
    """A digest of all that the kernels are compiled from, but for the kinds of a model's layers."""
    files = sorted(file for file in _SOURCES.rglob("*") if file.is_file())
    return digest_of(files, [*_FLAGS, *_KERNEL_FLAGS, *_HOST_FLAGS, flashinfer_version])


def _made_of(source: str, kind: str) -> str:
    """The name of the file that a source is compiled to."""
    return f"{Path(source).stem}.{kind}"
