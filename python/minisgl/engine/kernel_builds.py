"""Which kernels must be there before the first step.

They are compiled side by side while the weights are loaded. Compilers of libraries run before,
while torch is imported (`builds`); here they are waited for, and the libraries are loaded.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from minisgl.attention import PromptModules
from minisgl.builds import PROMPT_HEAD_DIMS, prompts_use_flashinfer
from minisgl.kernel import cuda_kernels_for, kernels_for
from minisgl.utils.cuda_toolkit import find_cuda_toolkit
from minisgl.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

_BLINK_S = 0.5  # how often the bar counts the seconds
_MOST = 8  # builds at a time; there are fewer


def fastest_attention(head_dim: int, prompt_modules: Callable[[], PromptModules]) -> str:
    """The attention backend of a GPU, if none is asked for.

    Args:
        head_dim: the width of the model's heads.
        prompt_modules: makes FlashInfer's, if they are needed.
    """
    if head_dim not in PROMPT_HEAD_DIMS:
        logger.warning(
            "the model's heads have %d numbers, and FlashInfer takes heads of %s, so attention is "
            "slower",
            head_dim,
            ", ".join(map(str, PROMPT_HEAD_DIMS)),
        )
        return "triton"
    if find_cuda_toolkit() is None and prompt_modules().missing:
        logger.warning(
            "there is no CUDA compiler (nvcc), so attention and some kernels are slower; "
            "pip install 'minisgl[cuda]' brings one"
        )
        return "triton"
    return "fi"


def kernels_to_build(
    device: torch.device,
    dtype: torch.dtype,
    attn: str,
    prompt_modules: Callable[[], PromptModules],
) -> dict[str, Callable[[], object]]:
    """The builds that can run before the first step, by the names in messages.

    Args:
        attn: one attention backend or two.
        prompt_modules: makes those of prompts. They may import FlashInfer, which takes a second.
    """
    nothing = torch.empty(0, dtype=dtype, device=device)
    builds: dict[str, Callable[[], object]] = {
        "kernels": partial(kernels_for, nothing),
        "CUDA kernels": partial(cuda_kernels_for, nothing),
    }
    if prompts_use_flashinfer(attn):
        builds["FlashInfer"] = lambda: prompt_modules().build()
    return builds


class KernelBuilds:
    """Runs builds side by side, each in a thread of its own. A second start finds them done.

    Args:
        builds: those that can start now, by the names in messages.
    """

    def __init__(self, builds: Mapping[str, Callable[[], object]]) -> None:
        self._pool = ThreadPoolExecutor(_MOST, thread_name_prefix="minisgl-build")
        self._names: dict[Future[object], str] = {}
        self.start(builds)

    def start(self, builds: Mapping[str, Callable[[], object]]) -> None:
        """Start further builds, before `wait`."""
        for name, build in builds.items():
            self._names[self._pool.submit(_run, name, build)] = name

    def wait(self) -> None:
        """Return when all are done. A bar says for what it waits.

        Raises:
            ConfigError: something cannot be compiled.
        """
        done, unfinished = concurrent.futures.wait(self._names, timeout=_BLINK_S)
        if unfinished:
            logger.info("waiting for %s; what is compiled is kept", self._names_of(unfinished))
            self._show_progress(len(done))
        self._pool.shutdown()
        for build in self._names:
            build.result()

    def _show_progress(self, num_done: int) -> None:
        with ProgressBar(total=len(self._names), initial=num_done, unit="build") as bar:
            while bar.n < bar.total:
                done, unfinished = concurrent.futures.wait(self._names, timeout=_BLINK_S)
                bar.set_description(f"Waiting for {self._names_of(unfinished)}", refresh=False)
                bar.n = len(done)
                bar.refresh()

    def _names_of(self, builds: Iterable[Future[object]]) -> str:
        return ", ".join(sorted(self._names[build] for build in builds))


def _run(name: str, build: Callable[[], object]) -> object:
    started = time.monotonic()
    try:
        return build()
    finally:
        logger.debug("%s: %.2f s", name, time.monotonic() - started)
