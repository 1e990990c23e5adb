"""The process loop of tokenizers and the detokenizer.

Both run this loop; what a process does depends on who writes to its queue. With `--num-tokenizer 0`
the detokenizer's queue gets the API server's messages too. All messages of a request take one way,
so that an abort cannot overtake its request.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from minisgl.errors import RequestError
from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BackendMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    ExitMsg,
    FrontendMsg,
    ReplyError,
    ShutdownMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    decoder,
    encode,
    pack_ids,
    unpack_ids,
)
from minisgl.tokenizer.tokenize import Tokenizer
from minisgl.utils.env import silence_transformers
from minisgl.utils.mp import Addresses, PullQueue, PushQueue
from minisgl.utils.supervisor import Ready, StartupReport, TokenizerInfo

logger = logging.getLogger(__name__)


class TokenizeWorker:
    """Handles one message after the other, until a ShutdownMsg.

    Args:
        max_seq_len: no prompt may have more tokens. The scheduler's own limit may be lower.
        allow_control_tokens: as for `Tokenizer`.
    """

    def __init__(
        self,
        folder: Path,
        max_seq_len: int,
        backend: PushQueue[BackendMsg],
        frontend: PushQueue[FrontendMsg],
        *,
        allow_control_tokens: bool = False,
    ) -> None:
        self._max_seq_len = max_seq_len
        self._tokenizer = Tokenizer(folder, allow_control_tokens=allow_control_tokens)
        self._detokenizer = self._tokenizer.make_detokenizer()
        self._backend = backend
        self._frontend = frontend

    @property
    def info(self) -> TokenizerInfo:
        return TokenizerInfo(self._tokenizer.chat_template, self._tokenizer.added_tokens)

    def run(self, inbox: PullQueue[TokenizerMsg]) -> None:
        while not isinstance(msg := inbox.get(), ShutdownMsg):
            self._handle(msg)
        if msg.stops_scheduler:
            self._backend.put(ExitMsg())

    def _handle(self, msg: TokenizerMsg) -> None:
        match msg:
            case TokenizeMsg():
                self._tokenize(msg)
            case EncodeMsg() | DecodeMsg():
                self._frontend.put(self._codec_reply(msg))
            case AbortMsg(uid):
                self._backend.put(AbortBackendMsg(uid))
            case BatchTokenizerMsg():
                self._detokenize(msg)

    def _tokenize(self, msg: TokenizeMsg) -> None:
        try:
            ids = self._tokenizer.encode(msg.prompt, max_tokens=self._max_seq_len)
        except RequestError as error:
            self._frontend.put(UserReply(msg.uid, error=ReplyError.of(error)))
        else:
            logger.debug("request %d has %d tokens", msg.uid, len(ids))
            self._backend.put(UserMsg(msg.uid, pack_ids(ids), msg.sampling))

    def _detokenize(self, batch: BatchTokenizerMsg) -> None:
        replies = []
        for msg in batch.msgs:
            reply = self._detokenizer.step(msg)
            if reply is None:
                continue
            replies.append(reply)
            scheduler_knows = msg.finish is not None or msg.error is not None
            if reply.is_final and not scheduler_knows:  # a stop text
                self._backend.put(AbortBackendMsg(msg.uid))
        if replies or batch.stats:
            self._frontend.put(BatchFrontendMsg(replies, batch.stats))

    def _codec_reply(self, msg: EncodeMsg | DecodeMsg) -> CodecReply:
        try:
            if isinstance(msg, DecodeMsg):
                return CodecReply(msg.uid, text=self._tokenizer.text_of(unpack_ids(msg.ids)))
            ids = self._tokenizer.encode(msg.prompt, add_special_tokens=msg.add_special_tokens)
            return CodecReply(msg.uid, ids=pack_ids(ids))
        except RequestError as error:
            return CodecReply(msg.uid, error=ReplyError.of(error))


def tokenize_worker(
    ready: Ready,
    folder: Path,
    max_seq_len: int,
    inbox: str,
    addresses: Addresses,
    allow_control_tokens: bool,
) -> None:
    """Body of a process: a tokenizer, the detokenizer, or both.

    Args:
        inbox: address of its queue.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """
    _hide_torch()
    queue: PullQueue[TokenizerMsg] = PullQueue(inbox, decoder(TokenizerMsg))
    backend = PushQueue[BackendMsg](addresses.backend, encode)
    frontend = PushQueue[FrontendMsg](addresses.frontend, encode)
    worker = TokenizeWorker(
        folder, max_seq_len, backend, frontend, allow_control_tokens=allow_control_tokens
    )
    ready(StartupReport(tokenizer=worker.info))
    worker.run(queue)


def _hide_torch() -> None:
    """Hide torch from transformers, which imports it wherever it is installed: a second and 180 MB.

    Where the main module imports torch, this process has imported it already, and it stays.
    """
    if "torch" not in sys.modules:
        silence_transformers()
        # None makes an import fail as if the package were not installed.
        sys.modules["torch"] = None  # type: ignore[assignment]
