"""The messages between processes.

    API process ─ TokenizeMsg ──────────────▶  tokenizer    ─ UserMsg ────────▶  scheduler 0
    API process ─ AbortMsg, FlushCacheMsg, NewDetokenizerMsg ─▶  tokenizer ─ the same ─▶ scheduler 0
    scheduler 0 ─ BatchSchedulerMsg, StepDigestMsg, MatchStatesMsg ─▶  scheduler 1..n-1
    scheduler 0 ─ GrammarVerdictMsg, GrammarCompiledMsg, ForgetGrammarMsg, StepCostsMsg ─▶  itself,
                  and so all ranks
    scheduler 0 ─ BatchDetokenizeMsg ───────▶  detokenizer  ─ BatchFrontendMsg ▶  API process
    detokenizer ─ AbortMsg, for a stop text ▶  scheduler 0
    tokenizer   ─ UserReply, for a refusal ─▶  API process
    API process ─ EncodeMsg, DecodeMsg ─────▶  tokenizer    ─ CodecReply ──────▶  API process
    API process ─ ShutdownMsg ──────────────▶  tokenizer    ─ ExitMsg ────────▶  scheduler 0
    scheduler 0 ─ ShutdownMsg ──────────────▶  detokenizer, if it is no tokenizer
    API process ─ the messages of peer.py ──▶  other API processes

Each file has the messages to one kind of process:

    base.py       how all are encoded
    tokenizer.py  to tokenizers and the detokenizer
    scheduler.py  to schedulers
    frontend.py   to API processes
    peer.py       between API processes

Every message is a frozen msgspec struct with its type as a tag. `encode` writes msgpack; a
`decoder` reads it back and checks every field. Nothing is unpickled. Prompts travel as raw
little-endian int32. A frame on a queue is one message. The Batch… messages carry all messages of a
step, or all that an `LLM` has posted before one.
"""

from minisgl.message.base import BaseMsg, decoder, encode, pack_ids, unpack_ids
from minisgl.message.frontend import (
    BatchFrontendMsg,
    CodecReply,
    EngineStats,
    FrontendMsg,
    ReplyError,
    TextLogprobs,
    UserReply,
    join_replies,
)
from minisgl.message.peer import (
    EndMsg,
    KeyLimitsMsg,
    MetricSample,
    MetricsQuery,
    MetricsReply,
    PeerMsg,
    RefuseMsg,
    ReplaceMsg,
    ResumeMsg,
    ServeMsg,
    SuspendMsg,
)
from minisgl.message.scheduler import (
    AbortMsg,
    BatchSchedulerMsg,
    ExitMsg,
    FlushCacheMsg,
    ForgetGrammarMsg,
    GrammarCompiledMsg,
    GrammarVerdictMsg,
    LeaderMsg,
    MatchState,
    MatchStatesMsg,
    NewDetokenizerMsg,
    SchedulerMsg,
    StepCostsMsg,
    StepDigestMsg,
    UserMsg,
)
from minisgl.message.tokenizer import (
    BatchDetokenizeMsg,
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
    encode_prompt,
    encoded_prompt,
    num_encoded_bytes,
    open_prompt,
)

__all__ = [
    "AbortMsg",
    "SchedulerMsg",
    "BaseMsg",
    "BatchSchedulerMsg",
    "BatchFrontendMsg",
    "BatchDetokenizeMsg",
    "ChatMessage",
    "CodecReply",
    "Conversation",
    "DecodeMsg",
    "DetokenizeMsg",
    "EncodeMsg",
    "EndMsg",
    "EngineStats",
    "ExitMsg",
    "FlushCacheMsg",
    "ForgetGrammarMsg",
    "FrontendMsg",
    "GrammarCompiledMsg",
    "GrammarVerdictMsg",
    "KeyLimitsMsg",
    "LeaderMsg",
    "MatchState",
    "MatchStatesMsg",
    "MetricSample",
    "MetricsQuery",
    "MetricsReply",
    "NewDetokenizerMsg",
    "PeerMsg",
    "Prompt",
    "RefuseMsg",
    "ReplaceMsg",
    "ReplyError",
    "ResumeMsg",
    "ServeMsg",
    "ShutdownMsg",
    "StepCostsMsg",
    "StepDigestMsg",
    "SuspendMsg",
    "TextLogprobs",
    "TokenIds",
    "TokenizeMsg",
    "TokenizerMsg",
    "UserMsg",
    "UserReply",
    "decoder",
    "encode",
    "encode_prompt",
    "encoded_prompt",
    "join_replies",
    "num_encoded_bytes",
    "open_prompt",
    "pack_ids",
    "unpack_ids",
]
