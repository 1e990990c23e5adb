"""The process loop of tokenizers and the detokenizer.

Both run this loop; which of the two a process is depends on which processes write to its queue.
With `--num-tokenizer 0` the detokenizer's queue gets the messages of API processes too. All
messages of a request go through one process, so that an abort cannot overtake its request.

Prompts and questions wait in a fair queue: a long one, or a request of many, does not keep short
ones waiting. The outputs of a step are handled before all jobs that wait, but do not interrupt a
job. Next to read: `tokenize.py`, `scheduler/io.py`, `detokenize.py`.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TypeAlias

from minisgl.checkpoint import ModelConfig
from minisgl.config import TokenizerOptions
from minisgl.errors import RequestError
from minisgl.message import (
    AbortMsg,
    BatchDetokenizeMsg,
    BatchFrontendMsg,
    CodecReply,
    Conversation,
    DecodeMsg,
    EncodeMsg,
    ExitMsg,
    FlushCacheMsg,
    FrontendMsg,
    NewDetokenizerMsg,
    ReplyError,
    SchedulerMsg,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    decoder,
    encode,
    pack_ids,
    unpack_ids,
)
from minisgl.processes.addresses import Addresses, api_of
from minisgl.processes.child import Ready, StartupReport
from minisgl.processes.limits import bounded
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.tokenizer.template_trial import try_template
from minisgl.tokenizer.tokenize import Tokenizer
from minisgl.utils.env import silence_transformers
from minisgl.utils.fair_queue import FairQueue
from minisgl.utils.garbage import collect_when_idle, start_serving
from minisgl.utils.heap import return_free_memory_regularly, use_one_heap
from minisgl.worker_info import TokenizerInfo, encode_info

logger = logging.getLogger(__name__)


Job: TypeAlias = TokenizeMsg | EncodeMsg | DecodeMsg
# Limits of the template for one chat, whose variables a client may choose.
_CHAT_CPU_S = 10.0
_CHAT_BYTES = 2**30
_BASE_COST = 64  # of any job, in characters
_BYTES_PER_CHARACTER = 32  # bytes of ids that take as long as a character of text


class TokenizeWorker:
    """A tokenizer, the detokenizer, or both, depending on the messages that it gets.

    It handles messages until a ShutdownMsg, and then the jobs that still wait.

    Args:
        max_seq_len: no prompt may have more tokens. The scheduler's own limit may be lower.
        frontends: the queues of the API processes.

    Raises:
        CheckpointError: the folder has no usable tokenizer, or its chat template takes too much.
    """

    def __init__(
        self,
        folder: Path,
        max_seq_len: int,
        scheduler: PushQueue[SchedulerMsg],
        frontends: list[PushQueue[FrontendMsg]],
        options: TokenizerOptions,
    ) -> None:
        self._max_seq_len = max_seq_len
        self._tokenizer = Tokenizer(folder, options)
        try_template(self._tokenizer.template, folder)
        self._tokenizer.template.bound = partial(bounded, _CHAT_CPU_S, _CHAT_BYTES)
        self._detokenizer = self._tokenizer.make_detokenizer()
        self._scheduler = scheduler
        self._frontends = frontends
        self._jobs: dict[int, Job] = {}  # those that wait, by uid
        self._turns: FairQueue[int] = FairQueue()  # their uids, and those of dropped ones

    def get_ready_for_prompts(self) -> None:
        """Do what the first prompts would wait for."""
        self._tokenizer.get_ready(self._max_seq_len)

    def warn(self, vocab_size: int) -> None:
        """Say which prompts will be refused.

        Args:
            vocab_size: the model's.
        """
        last_id = max(self._tokenizer.added_tokens.values(), default=0)
        if last_id >= vocab_size:
            logger.warning(
                "prompts with some tokens will be refused: the tokenizer has ids up to %d, "
                "and the model only ids below %d",
                last_id,
                vocab_size,
            )
        template = self._tokenizer.template
        damage = template.damage
        if damage is not None:
            chats = "chats without tools" if template.shows_tools else "chats"
            logger.warning(
                "%s will be refused, the model's chat template is damaged: %s", chats, damage
            )
        damage_for_tools = template.damage_for_tools
        if damage_for_tools is not None:
            consequence = "chats with tools will be refused"
            if template.describes_tools and damage is None:
                consequence = "a system message describes tools"
            logger.warning(
                "%s, the model's chat template for tools is damaged: %s",
                consequence,
                damage_for_tools,
            )
        if template.lack is not None:
            logger.warning("chats without tools will be refused: %s", template.lack)

    def get_ready_for_answers(self) -> None:
        """Do what the first answers would wait for."""
        self._detokenizer.get_ready()

    @property
    def info(self) -> TokenizerInfo:
        tokenizer = self._tokenizer
        return TokenizerInfo(
            tokenizer.template.text,
            tokenizer.added_tokens,
            tokenizer.template.describes_tools,
            tokenizer.template.call_format,
        )

    def run(self, inbox: PullQueue[TokenizerMsg]) -> None:
        shutdown: ShutdownMsg | None = None
        while shutdown is None:
            if not self._turns and self._detokenizer.num_open == 0:
                collect_when_idle()
            for msg in inbox.drain(block=not self._turns):
                if isinstance(msg, ShutdownMsg):
                    shutdown = msg
                    break
                self._receive(msg)
            self._do_next()
        while self._turns:
            self._do_next()
        if shutdown.stops_scheduler:
            self._scheduler.put(ExitMsg())

    def _receive(
        self, msg: Job | AbortMsg | FlushCacheMsg | NewDetokenizerMsg | BatchDetokenizeMsg
    ) -> None:
        match msg:
            case AbortMsg(uid):
                self._abort(uid)
            case BatchDetokenizeMsg():
                self._detokenize(msg)
            case FlushCacheMsg() | NewDetokenizerMsg():
                self._scheduler.put(msg)
            case _:
                self._jobs[msg.uid] = msg
                self._turns.put(msg.uid, _cost(msg), _flow(msg))

    def _abort(self, uid: int) -> None:
        """Drop a job that waits. If it was already sent on, the scheduler aborts it."""
        match self._jobs.pop(uid, None):
            case None:
                self._scheduler.put(AbortMsg(uid))
            case TokenizeMsg():
                self._send(UserReply(uid, finish="abort"))

    def _do_next(self) -> None:
        """Do the job whose turn it is, if there is one."""
        if not self._turns:
            return
        job = self._jobs.pop(self._turns.take(), None)
        match job:
            case TokenizeMsg():
                self._tokenize(job)
            case EncodeMsg() | DecodeMsg():
                self._send(self._codec_reply(job))
            case None:  # it was aborted
                pass

    def _tokenize(self, msg: TokenizeMsg) -> None:
        try:
            ids = self._tokenizer.encode(msg.prompt, max_tokens=self._max_seq_len)
        except RequestError as error:
            self._send(UserReply(msg.uid, error=ReplyError.of(error)))
        else:
            logger.debug("request %d has %d tokens", msg.uid, len(ids))
            self._scheduler.put(UserMsg(msg.uid, pack_ids(ids), msg.sampling))

    def _send(self, reply: UserReply | CodecReply) -> None:
        """Send a reply to the API process that has its request."""
        self._frontends[api_of(reply.uid, len(self._frontends))].put(reply)

    def _detokenize(self, batch: BatchDetokenizeMsg) -> None:
        """Send the replies of a step, one message to each API process; all get the statistics."""
        num_api = len(self._frontends)
        replies: list[list[UserReply]] = [[] for _ in range(num_api)]
        for msg in batch.msgs:
            if not self._detokenizer.can_take(msg):
                if not msg.is_final:
                    self._scheduler.put(AbortMsg(msg.uid))
                continue
            reply = self._detokenizer.make_reply(msg)
            if reply is None:
                continue
            replies[api_of(reply.uid, num_api)].append(reply)
            if reply.is_final and not msg.is_final:  # a stop text, which the scheduler cannot see
                self._scheduler.put(AbortMsg(msg.uid))
        for frontend, its_replies in zip(self._frontends, replies, strict=True):
            if its_replies or batch.stats:
                frontend.put(BatchFrontendMsg(its_replies, batch.stats))

    def _codec_reply(self, msg: EncodeMsg | DecodeMsg) -> CodecReply:
        try:
            if isinstance(msg, DecodeMsg):
                return CodecReply(msg.uid, text=self._tokenizer.text_of(unpack_ids(msg.ids)))
            ids = self._tokenizer.encode(
                msg.prompt,
                add_special_tokens=msg.add_special_tokens,
                max_tokens=self._max_seq_len,
            )
            return CodecReply(msg.uid, ids=pack_ids(ids))
        except RequestError as error:
            return CodecReply(msg.uid, error=ReplyError.of(error))


def _flow(job: Job) -> int:
    """Jobs of one API request share a flow."""
    if isinstance(job, TokenizeMsg) and job.first_uid is not None:
        return job.first_uid
    return job.uid


def _cost(job: Job) -> int:
    """About how long a job takes, in characters to tokenize."""
    if isinstance(job, DecodeMsg):
        return _BASE_COST + len(job.ids)
    match job.prompt:
        case str(text):
            return _BASE_COST + len(text)
        case TokenIds(raw):
            return _BASE_COST + len(raw) // _BYTES_PER_CHARACTER
        case Conversation(messages, _, variables, tools):
            num_parts = len(messages) + len(tools)
            return _BASE_COST * (1 + num_parts) + _num_characters([messages, variables, tools])


def _num_characters(value: object) -> int:
    """Of all strings in a value of JSON: a chat template may write any of them."""
    number = 0
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                number += len(text)
            case list(items):
                waiting += items
            case dict(fields):
                waiting += [*fields.keys(), *fields.values()]
    return number


def tokenize_worker(
    ready: Ready,
    folder: Path,
    max_seq_len: int,
    inbox: str,
    addresses: Addresses,
    options: TokenizerOptions,
) -> None:
    """Body of a process: a tokenizer, the detokenizer, or both.

    Args:
        inbox: address of its queue.

    Raises:
        CheckpointError: as `TokenizeWorker`, which reads the folder.
    """
    use_one_heap()
    _hide_torch()
    queue: PullQueue[TokenizerMsg] = PullQueue(inbox, decoder(TokenizerMsg), ready.beat)
    scheduler = PushQueue[SchedulerMsg](addresses.scheduler, encode)
    frontends = [PushQueue[FrontendMsg](address, encode) for address in addresses.frontends]
    worker = TokenizeWorker(folder, max_seq_len, scheduler, frontends, options)
    if inbox in addresses.tokenizers:  # those of the detokenizer too, where no other has prompts
        worker.get_ready_for_prompts()
    if inbox == addresses.tokenizers[0]:  # once
        worker.warn(ModelConfig.from_folder(folder).vocab_size)
    if inbox == addresses.detokenizer:
        worker.get_ready_for_answers()
    start_serving()
    return_free_memory_regularly()
    ready(StartupReport(info=encode_info(worker.info)))
    worker.run(queue)
    # API processes end their requests before they let this process end. Those that have ended would
    # each cost a second of waiting.
    for frontend in frontends:
        frontend.drop()


def _hide_torch() -> None:
    """Hide torch from transformers, which imports it wherever it is installed: a second and 180 MB.

    Where the main module imports torch, this process has imported it already, and it stays.
    """
    if "torch" not in sys.modules:
        silence_transformers()
        # None makes an import fail as if the package were not installed.
        sys.modules["torch"] = None  # type: ignore[assignment]
