"""What workers report about themselves when they are ready, in their `StartupReport`.

It is no part of `message`, which imports numpy: the server starts its workers before that.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class SchedulerInfo(msgspec.Struct, frozen=True, tag=True):
    """What the server needs to know of a rank.

    Attributes:
        max_seq_len: tokens of a prompt and its answer together.
        device: cpu or cuda.
    """

    max_seq_len: int
    device: str


class TokenizerInfo(msgspec.Struct, frozen=True, tag=True):
    """What an API process needs to know of a tokenizer.

    Attributes:
        added_tokens: ids of the tokens that are never split, such as `<|im_end|>`, by their texts.
        describes_tools: whether it describes tools in Hermes' form, since the template cannot.
        call_format: name of the format in which its prompts have calls of tools, if it is known.
    """

    chat_template: str | None
    added_tokens: dict[str, int]
    describes_tools: bool = False
    call_format: str | None = None


WorkerInfo: TypeAlias = SchedulerInfo | TokenizerInfo


def encode_info(info: WorkerInfo) -> bytes:
    return msgspec.json.encode(info)


def decode_info(encoded: bytes) -> WorkerInfo:
    info: WorkerInfo = msgspec.json.decode(encoded, type=WorkerInfo)
    return info
