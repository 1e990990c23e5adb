"""Libraries that are compiled at the first start: which a model needs, and where they are kept.

Nothing here imports torch. So compilers run while a rank's process imports it (`rank_process.py`).
The code that loads a library calls `Library.make_in`, too: it waits for a running compiler, or
finds the file.

    library.py           a library and its file; one process at a time makes it
    kernels.py           the libraries of kernel/csrc
    prompt_attention.py  those of kernel/csrc/hopper: attention of prompts
    needed.py            which of them a rank will load
    compilers.py         runs compilers that end with this process
    compiler_process.py  the program that does that

The libraries are loaded by `kernel/native.py` and `attention/flashinfer/modules.py`.
"""

from minisgl.builds.kernels import CUDA_DTYPES, cpu_library, cuda_library
from minisgl.builds.library import Library, library_folder
from minisgl.builds.needed import needed_libraries, prompts_use_flashinfer
from minisgl.builds.prompt_attention import (
    HOPPER,
    PROMPT_HEAD_DIMS,
    FlashInferSources,
    PromptKernels,
    find_flashinfer_sources,
    prompt_kernels,
)

__all__ = [
    "CUDA_DTYPES",
    "HOPPER",
    "PROMPT_HEAD_DIMS",
    "Library",
    "PromptKernels",
    "FlashInferSources",
    "cpu_library",
    "cuda_library",
    "find_flashinfer_sources",
    "library_folder",
    "needed_libraries",
    "prompt_kernels",
    "prompts_use_flashinfer",
]
