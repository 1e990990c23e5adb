"""The addresses of the queues of one server, and which process has a request.

From a uid follow the API process that gave it and the tokenizer that gets all its messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

DETOKENIZER = "detokenizer"  # the name of the process


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the queues of one server: sockets in a folder that its processes have access to.

    Attributes:
        num_tokenizer: tokenizers with a queue of their own; with zero the detokenizer's queue is
            used.
        epoch: how often the workers were started again. Every start has sockets of its own, except
            those of API processes, so that no worker reads messages for an earlier one.
        num_api: API processes.
        lives: how often each tokenizer and the detokenizer was replaced in this epoch, by name. A
            successor has a socket of its own, for the same reason.
    """

    folder: Path
    num_tokenizer: int = 0
    epoch: int = 0
    num_api: int = 1
    lives: Mapping[str, int] = field(default_factory=dict)

    def in_epoch(self, epoch: int) -> Self:
        """The addresses at the beginning of another epoch."""
        return replace(self, epoch=epoch, lives={})

    def in_life(self, name: str, life: int) -> Self:
        """The addresses after a tokenizer or the detokenizer was replaced.

        Args:
            life: how often it was, in this epoch.
        """
        return replace(self, lives={**self.lives, name: life})

    def life_of(self, name: str) -> int:
        return self.lives.get(name, 0)

    @property
    def frontends(self) -> list[str]:
        """Where the API processes get replies."""
        return [f"ipc://{self.folder / f'frontend-{i}'}" for i in range(self.num_api)]

    @property
    def peers(self) -> list[str]:
        """Where the API processes get messages of each other."""
        return [f"ipc://{self.folder / f'peer-{i}'}" for i in range(self.num_api)]

    @property
    def scheduler(self) -> str:
        return self._socket("scheduler")

    @property
    def detokenizer(self) -> str:
        return self._socket(DETOKENIZER)

    @property
    def tokenizer_names(self) -> list[str]:
        """The names of the processes that tokenize."""
        if self.num_tokenizer == 0:
            return [DETOKENIZER]
        return [f"tokenizer-{i}" for i in range(self.num_tokenizer)]

    @property
    def tokenizers(self) -> list[str]:
        return [self._socket(name) for name in self.tokenizer_names]

    def rank(self, rank: int) -> str:
        return self._socket(f"rank-{rank}")

    @property
    def rendezvous(self) -> Path:
        """The file through which tensor-parallel ranks find each other."""
        return self.folder / f"rendezvous.{self.epoch}"

    def _socket(self, name: str) -> str:
        return f"ipc://{self.folder / name}.{self.epoch}.{self.life_of(name)}"


def uids_of_api(api: int, num_api: int) -> Iterator[int]:
    """The uids that an API process gives: a uid says whose request it is."""
    return itertools.count(api, num_api)


def api_of(uid: int, num_api: int) -> int:
    """The API process that gave a uid."""
    return uid % num_api


def tokenizer_of(uid: int, num_api: int, num_tokenizer: int) -> int:
    """The tokenizer to which all messages of a request go."""
    return uid // num_api % num_tokenizer
