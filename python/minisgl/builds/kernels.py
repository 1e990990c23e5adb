"""The libraries of kernel/csrc: kernels for this processor, and for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minisgl.builds.library import Library, digest_of, ffi_include_options, ffi_link_options
from minisgl.utils.cuda_toolkit import find_cuda_toolkit

_SOURCES = Path(__file__).parents[1] / "kernel" / "csrc"
_CPU_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"]
_CPU_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
_CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC"]
# Of weights and activations: for models in these, a GPU's kernels are used.
CUDA_DTYPES = ("bfloat16",)


def cpu_library() -> Library:
    """The library of *.cpp, for this processor."""
    processor = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    features = [line for line in processor.splitlines() if line.startswith(("flags", "Features"))]
    return _library("cpu", ("*.cpp", "*.h"), "c++", _CPU_FLAGS, [], features)


def cuda_library(capability: tuple[int, int]) -> Library:
    """The library of *.cu, for GPUs of a compute capability."""
    major, minor = capability
    own_features = "a" if major == 9 else ""  # of Hopper, which a later GPU need not have
    flags = [*_CUDA_FLAGS, f"-arch=sm_{major}{minor}{own_features}"]
    files = ("*.cu", "*.cuh")
    toolkit = find_cuda_toolkit()
    if toolkit is None:
        return _library("gpu", files, None, flags, [], [])
    return _library("gpu", files, str(toolkit.nvcc), flags, [f"-L{toolkit.home / 'lib64'}"], [])


def _library(
    name: str,
    files: tuple[str, str],
    compiler: str | None,
    flags: Sequence[str],
    link_flags: Sequence[str],
    features: Sequence[str],
) -> Library:
    """
    OpenMP is compiled in but not linked, so that the threads are those of torch's own runtime.

    Args:
        files: patterns of the sources, and of the headers that they include.
        features: of the processor. The compiler finds them itself; here they tell names apart.
    """
    sources, headers = (sorted(_SOURCES.glob(pattern)) for pattern in files)
    options = [*flags, f"-I{_SOURCES}", *ffi_include_options()]
    objects = [f"{source.stem}.o" for source in sources]
    return Library(
        name=f"{name}-{digest_of([*sources, *headers], [*flags, *features])}",
        compiler=compiler,
        compilations=[
            [*options, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ],
        linking=["-shared", *objects, *link_flags, *ffi_link_options()],
    )
