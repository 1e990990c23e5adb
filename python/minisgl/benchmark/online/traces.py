"""Files of recorded arrivals: Mooncake's JSON lines and Azure's CSV.

Mooncake (Qin et al. 2024, arXiv:2407.00079) gives the hashes of each prompt's blocks of 512 tokens;
equal hashes are equal prefixes. Azure (Patel et al. 2023, arXiv:2311.18677) gives lengths only.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at_s: on the trace's clock.
        blocks: the hash of each block of the prompt, if the trace has them.
    """

    at_s: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()


TRACE_BLOCK = 512  # tokens that a hash of Mooncake's trace stands for
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...]

    def __post_init__(self) -> None:
        most = -(-self.input_length // TRACE_BLOCK)
        if len(self.hash_ids) > most:
            raise ValueError(f"{self.input_length} tokens have {len(self.hash_ids)} blocks")


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace, in the order of arrival.

    Raises:
        ConfigError: the file is missing, of an unknown kind, empty, or a line is malformed.
    """
    readers: dict[str, Callable[[Path], Iterator[Arrival]]] = {
        ".jsonl": _mooncake,
        ".csv": _azure,
    }
    if path.suffix not in readers:
        raise ConfigError(f"--trace is {path}; it must end in one of {', '.join(readers)}")
    arrivals: list[Arrival] = []
    try:
        arrivals.extend(readers[path.suffix](path))
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--trace {path}, after {len(arrivals)} requests: {error!r}") from error
    if not arrivals:
        raise ConfigError(f"--trace {path} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _mooncake(path: Path) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as file:
        for text in file:
            line = decoder.decode(text)
            yield Arrival(
                line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids
            )


def _azure(path: Path) -> Iterator[Arrival]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            num_input = int(row["ContextTokens"])
            num_output = int(row["GeneratedTokens"])
            if min(num_input, num_output) < 0:
                raise ValueError(f"{num_input} and {num_output} tokens")
            yield Arrival(at_s, num_input, num_output)
