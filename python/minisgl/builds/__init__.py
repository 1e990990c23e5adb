"""Libraries that compilers make at a first start: what a model needs, and where they are kept.

Nothing here imports torch. So compilers run while a rank's process imports it (`rank_process.py`).
Who loads a library makes it, too. It then waits for the compilers that run, or finds it.

    library.py           a library and its file; one process at a time makes it
    kernels.py           the libraries of kernel/csrc
    prompts.py           those of kernel/csrc/hopper, which attend in prompts
    needed.py            which of them a rank will load
    compilers.py         runs compilers that end with this process
    compiler_process.py  the program that does that

Who calls what is compiled is in `kernel/native.py` and `attention/flashinfer_modules.py`.
"""

from minisgl.builds.kernels import CUDA_DTYPES, cpu_library, cuda_library
from minisgl.builds.library import Library, library_folder
from minisgl.builds.needed import needed_libraries, prompts_use_flashinfer
from minisgl.builds.prompts import HOPPER, PromptKernels, Sources, find_sources, prompt_kernels

__all__ = [
    "CUDA_DTYPES",
    "HOPPER",
    "Library",
    "PromptKernels",
    "Sources",
    "cpu_library",
    "cuda_library",
    "find_sources",
    "library_folder",
    "needed_libraries",
    "prompt_kernels",
    "prompts_use_flashinfer",
]
