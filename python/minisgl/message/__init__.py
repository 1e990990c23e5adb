"""What the processes say to each other.

    API server ─TokenizeMsg, AbortMsg─▶ tokenizer ─UserMsg, AbortBackendMsg─▶ scheduler 0 ─BatchBackendMsg─▶ ranks
    API server ◀─────UserReply───── detokenizer ◀────────DetokenizeMsg────────┘
    API server ─EncodeMsg, DecodeMsg─▶ tokenizer ─CodecReply─▶ API server

Every message is a frozen msgspec struct with its type as a tag; `encode` and a `decoder` turn it into msgpack
and back and check every field. Nothing is ever unpickled. Token ids travel as raw little-endian int32.
A frame on a queue is always one message; the Batch… messages carry several.
"""

from minisgl.message.backend import (
    AbortBackendMsg,
    BackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    ExitMsg,
    UserMsg,
)
from minisgl.message.base import BaseMsg, decoder, encode, pack_ids, unpack_ids
from minisgl.message.frontend import (
    BaseFrontendMsg,
    BatchFrontendMsg,
    CodecReply,
    EngineStats,
    FrontendMsg,
    ReplyError,
    TextLogprobs,
    UserReply,
)
from minisgl.message.tokenizer import (
    AbortMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    ChatMessage,
    Conversation,
    DecodeMsg,
    DetokenizeMsg,
    EncodeMsg,
    Prompt,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
)

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "BackendMsg",
    "BaseBackendMsg",
    "BaseFrontendMsg",
    "BaseMsg",
    "BaseTokenizerMsg",
    "BatchBackendMsg",
    "BatchFrontendMsg",
    "BatchTokenizerMsg",
    "ChatMessage",
    "Conversation",
    "CodecReply",
    "DecodeMsg",
    "DetokenizeMsg",
    "EncodeMsg",
    "EngineStats",
    "ExitMsg",
    "FrontendMsg",
    "Prompt",
    "ReplyError",
    "ShutdownMsg",
    "TextLogprobs",
    "TokenIds",
    "TokenizeMsg",
    "TokenizerMsg",
    "UserMsg",
    "UserReply",
    "decoder",
    "encode",
    "pack_ids",
    "unpack_ids",
]
