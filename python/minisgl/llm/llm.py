"""Batches without a server.

`LLM` has a scheduler and its engine in this process and steps them itself; further tensor-parallel ranks run in
processes of their own, as they do under the server. Next to read: `scheduler/scheduler.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minisgl.checkpoint import fetch_model
from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.errors import EngineFailed, InvalidRequest, RequestError
from minisgl.message import (
    AbortBackendMsg,
    BackendMsg,
    ChatMessage,
    Conversation,
    DetokenizeMsg,
    EngineStats,
    ExitMsg,
    UserMsg,
    UserReply,
    pack_ids,
)
from minisgl.scheduler import Scheduler, SchedulerConfig, lead
from minisgl.tokenizer import Tokenizer
from minisgl.utils import detect_hardware
from minisgl.utils.mp import Addresses, private_folder
from minisgl.utils.supervisor import Supervisor

_START_TIMEOUT_S = 900.0
Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """News of one prompt: the token that was made, if any, and the text that is certain now."""

    index: int
    token: int | None
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A finished answer. An end-of-sequence token is among the ids but not in the text.

    Attributes:
        logprobs: of each token, if they were asked for.
        prompt_logprobs: of each token of the prompt, if they were asked for; None for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt: int
    num_cached: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class _Mailbox:
    """Both ends of the scheduler's mail, in one process."""

    def __init__(self) -> None:
        self.to_scheduler: list[BackendMsg] = []
        self.from_scheduler: list[DetokenizeMsg] = []

    def receive(self, *, block: bool) -> Sequence[BackendMsg]:
        assert self.to_scheduler or not block
        msgs, self.to_scheduler = self.to_scheduler, []
        return msgs

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:  # noqa: ARG002 - nobody watches
        self.from_scheduler += msgs

    def take(self) -> list[DetokenizeMsg]:
        msgs, self.from_scheduler = self.from_scheduler, []
        return msgs


class LLM:
    """A model and its engine, for offline use. Not thread-safe.

    Use it as a context manager, or `close` it. With tp > 1 the calling script needs the usual
    `if __name__ == "__main__":` of multiprocessing.

    Args:
        model: a folder, a .gguf file, a hub id, or None for the default model.
        skip_tokenizer_init: take and give token ids only; texts stay empty.
        options: any field of `SchedulerConfig`; docs/features.md lists them.

    Raises:
        ConfigError: an option or the model cannot work.
        EngineFailed: a rank did not start.
    """

    def __init__(
        self, model: str | Path | None = None, *, skip_tokenizer_init: bool = False, **options: Any
    ) -> None:
        config = SchedulerConfig(model=None if model is None else str(model), **options)
        folder = fetch_model(config.model, config.model_source)
        config = config.agree(folder).resolve(detect_hardware())
        self._mailbox = _Mailbox()
        self._uids = itertools.count()
        self._readers: dict[int, deque[DetokenizeMsg]] = {}
        self._has_failed = False
        with ExitStack() as stack:
            addresses = Addresses(stack.enter_context(private_folder()))
            supervisor = stack.enter_context(Supervisor("WARNING"))
            for rank in range(1, config.tp):
                supervisor.start(
                    f"scheduler-{rank}",
                    "minisgl.scheduler:scheduler_worker",
                    config,
                    rank,
                    addresses,
                )
            engine = Engine(config, DistributedInfo(0, config.tp), addresses.meeting)
            stack.callback(engine.close)
            supervisor.wait_ready(_START_TIMEOUT_S)
            inbox = lead(self._mailbox, config.tp, addresses)
            stack.callback(inbox.close)
            self._scheduler = Scheduler(config, engine, inbox, self._mailbox)
            self._optional_tokenizer = None if skip_tokenizer_init else Tokenizer(folder)
            self._resources = stack.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Complete texts or token ids.

        Args:
            prompts: one or several; a text gets the model's special tokens, ids are taken as they are.
            sampling_params: for all prompts, or one for each.

        Returns:
            one output a prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are refused; none was run to its end.
            EngineFailed: the engine died; close this object.
        """
        several = _several(prompts)
        each = self._each(several, sampling_params)
        answers = [_Collected(params) for params in each]
        with tqdm(
            total=len(several), disable=not use_tqdm, unit="prompt", dynamic_ncols=True
        ) as bar:
            num_tokens = 0
            for index, news, reply in self._run(
                several, each, wants_text=any(params.stop for params in each)
            ):
                answers[index].take(news, reply)
                num_tokens += news.token is not None
                if answers[index].finish:
                    bar.update()
                    bar.set_postfix_str(
                        f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
        return [self._output(answer) for answer in answers]

    def _output(self, answer: _Collected) -> GenerationOutput:
        assert answer.last is not None and answer.finish is not None
        text = "".join(answer.texts)
        if not answer.texts and self._optional_tokenizer:
            text = self._optional_tokenizer.decode(
                answer.said, skip_special_tokens=answer.params.skip_special_tokens
            )
        logprobs = None if answer.params.logprobs is None else answer.logprobs
        of_prompt = None if answer.params.prompt_logprobs is None else answer.prompt_logprobs
        return GenerationOutput(
            text,
            answer.ids,
            answer.finish,
            answer.last.num_prompt,
            answer.last.num_cached,
            logprobs,
            of_prompt,
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._optional_tokenizer is None:
            raise InvalidRequest(
                "without a tokenizer (skip_tokenizer_init) prompts must be token ids"
            )
        return self._optional_tokenizer

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[NDArray[np.float32]]:
        """A vector of length 1 for each text or list of ids: the last hidden state behind the final norm.

        Raises:
            RequestError: a prompt is refused.
            EngineFailed: the engine died; close this object.
        """
        several = _several(prompts)
        each = [SamplingParams(max_tokens=0, embeds=True)] * len(several)
        raw = {
            index: news.embedding or b""
            for index, news, _ in self._run(several, each, wants_text=False)
        }
        return [np.frombuffer(raw[index], "<f4") for index in range(len(several))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Like `generate`, token by token as they come. Closing the iterator aborts what has not finished."""
        several = _several(prompts)
        each = self._each(several, sampling_params)
        wants_text = self._optional_tokenizer is not None or any(params.stop for params in each)
        for index, news, reply in self._run(several, each, wants_text=wants_text):
            text, finish = (reply.text, reply.finish) if reply else ("", news.finish)
            yield StreamOutput(index, news.token, text, finish)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        use_tqdm: bool = False,
    ) -> list[GenerationOutput]:
        """Answer one conversation or several, through the model's chat template; see `generate`.

        Args:
            tools: what the template offers to the model, in OpenAI's format. Calls are part of the text.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        chats = [Conversation(list(conversation), tools=list(tools)) for conversation in several]  # type: ignore[arg-type]
        prompts = [self._tokenizer.encode(chat).tolist() for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _each(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        """The parameters of each prompt."""
        each = (
            [params or SamplingParams()] * len(prompts)
            if not isinstance(params, Sequence)
            else params
        )
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts came with {len(each)} sampling_params")
        return each

    def _run(
        self, prompts: list[Prompt], each: Sequence[SamplingParams], *, wants_text: bool
    ) -> Iterator[tuple[int, DetokenizeMsg, UserReply | None]]:
        """Step until all have finished; yields the index of a prompt, its news, and these as text if it is wanted."""
        detokenizer = self._tokenizer.make_detokenizer() if wants_text else None
        mail: deque[DetokenizeMsg] = deque()
        first = self._submit(prompts, each, mail)
        everyone = set(range(first, first + len(prompts)))
        unfinished = set(everyone)
        try:
            while unfinished:
                while not mail:
                    self._check_usable()
                    self._step()
                news = mail.popleft()
                reply = detokenizer.step(news) if detokenizer else None
                if detokenizer and not reply:  # its stop text came before
                    continue
                if news.finish or news.error or (reply and reply.finish):
                    unfinished.discard(news.uid)
                if news.error is not None:
                    raise RequestError(
                        news.error.message, param=news.error.param, code=news.error.code
                    )
                if reply and reply.finish and not news.finish:
                    self._mailbox.to_scheduler.append(AbortBackendMsg(news.uid))
                yield news.uid - first, news, reply
        finally:
            self._abort(everyone & self._readers.keys())

    def _submit(
        self, prompts: list[Prompt], each: Sequence[SamplingParams], mail: deque[DetokenizeMsg]
    ) -> int:
        """Post the prompts under consecutive uids, whose news go to `mail`; returns the first."""
        self._check_usable()
        ids = [
            pack_ids(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for prompt in prompts
        ]
        uids = [next(self._uids) for _ in prompts]
        for uid, prompt_ids, sampling in zip(uids, ids, each, strict=True):
            self._readers[uid] = mail
            self._mailbox.to_scheduler.append(UserMsg(uid, prompt_ids, sampling))
        return uids[0] if uids else 0

    def _check_usable(self) -> None:
        if self._has_failed or not self._scheduler.is_running:
            raise EngineFailed(
                "a step of this LLM was broken off" if self._has_failed else "this LLM is closed"
            )

    def _step(self) -> None:
        """One step; its news go to those who wait for them."""
        try:
            self._scheduler.step()
        except BaseException as error:  # what the step had begun is lost, whatever has ended it
            self._has_failed = True
            if not isinstance(
                error, RuntimeError
            ):  # a collective whose peer has died, or a device that failed
                raise
            raise EngineFailed(f"the engine failed: {error}") from error
        for news in self._mailbox.take():
            is_last = news.finish is not None or news.error is not None
            mail = self._readers.pop(news.uid) if is_last else self._readers[news.uid]
            mail.append(news)

    def _abort(self, uids: set[int]) -> None:
        """Give up what has not finished, and wait until nothing of it is left."""
        if self._has_failed or not self._scheduler.is_running:
            return
        self._mailbox.to_scheduler += [AbortBackendMsg(uid) for uid in sorted(uids)]
        while uids & self._readers.keys():
            self._step()

    def close(self) -> None:
        """End the other ranks and free the engine. May be called more than once."""
        if self._scheduler.is_running:
            self._mailbox.to_scheduler.append(ExitMsg())
            with suppress(EngineFailed):
                self._step()
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Collected:
    """An answer while it grows."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.ids: list[int] = []
        self.said: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish: FinishReason | None = None
        self.last: DetokenizeMsg | None = None

    def take(self, news: DetokenizeMsg, reply: UserReply | None) -> None:
        if news.token is not None:
            self.ids.append(news.token)
            if news.finish != "stop":  # the token that says stop is not part of the text
                self.said.append(news.token)
        if news.logprobs is not None:
            self.logprobs.append(news.logprobs)
        self.prompt_logprobs += [told for _, told in news.prompt_logprobs or ()]
        if reply is not None:
            self.texts.append(reply.text)
        self.finish = reply.finish if reply else news.finish
        self.last = news


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
