"""The process loop of tokenizers and the detokenizer.

Both run this loop; which of the two a process is depends on who writes to its queue. With `--num-tokenizer 0` the
detokenizer's queue gets the API server's messages too. A request's messages all take the same way, so an abort
cannot overtake its request.
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
from minisgl.utils.supervisor import Ready, Report, Vocabulary

logger = logging.getLogger(__name__)


class TokenizeWorker:
    """Handles one message after the other. No message can end it but a ShutdownMsg.

    Args:
        max_seq_len: tokens that no prompt can exceed; the scheduler's own limit may be lower.
    """

    def __init__(
        self,
        folder: Path,
        max_seq_len: int,
        backend: PushQueue[BackendMsg],
        frontend: PushQueue[FrontendMsg],
    ) -> None:
        self._max_seq_len = max_seq_len
        self._tokenizer = Tokenizer(folder)
        self._detokenizer = self._tokenizer.make_detokenizer()
        self._backend = backend
        self._frontend = frontend

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer.chat_template, self._tokenizer.markers)

    def run(self, inbox: PullQueue[TokenizerMsg]) -> None:
        while not isinstance(msg := inbox.get(), ShutdownMsg):
            self._handle(msg)
        if msg.pass_on:
            self._backend.put(ExitMsg())

    def _handle(self, msg: TokenizerMsg) -> None:
        match msg:
            case TokenizeMsg():
                self._tokenize(msg)
            case EncodeMsg() | DecodeMsg():
                self._frontend.put(self._translate(msg))
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
            if reply := self._detokenizer.step(msg):
                replies.append(reply)
                if reply.is_final and not (
                    msg.finish or msg.error
                ):  # a stop text, which the scheduler cannot see
                    self._backend.put(AbortBackendMsg(msg.uid))
        if replies or batch.stats:
            self._frontend.put(BatchFrontendMsg(replies, batch.stats))

    def _translate(self, msg: EncodeMsg | DecodeMsg) -> CodecReply:
        try:
            if isinstance(msg, DecodeMsg):
                return CodecReply(msg.uid, text=self._tokenizer.text_of(unpack_ids(msg.ids)))
            ids = self._tokenizer.encode(msg.prompt, add_special_tokens=msg.add_special_tokens)
            return CodecReply(msg.uid, ids=pack_ids(ids))
        except RequestError as error:
            return CodecReply(msg.uid, error=ReplyError.of(error))


def tokenize_worker(
    ready: Ready, folder: Path, max_seq_len: int, inbox: str, addresses: Addresses
) -> None:
    """Body of a process: a tokenizer, the detokenizer, or both, as the address of its `inbox` says.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """
    _do_without_torch()
    queue: PullQueue[TokenizerMsg] = PullQueue(inbox, decoder(TokenizerMsg))
    backend = PushQueue[BackendMsg](addresses.backend, encode)
    frontend = PushQueue[FrontendMsg](addresses.frontend, encode)
    worker = TokenizeWorker(folder, max_seq_len, backend, frontend)
    ready(Report(vocabulary=worker.vocabulary))
    worker.run(queue)


def _do_without_torch() -> None:
    """Hide torch from transformers, which would import it only to know that it is there: a second and 180 MB.

    A main module that imports torch has done so in this process, too.
    """
    if "torch" not in sys.modules:
        silence_transformers()
        sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's word for "there is none"
