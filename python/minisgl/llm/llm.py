"""Offline use, without a server.

`LLM` has a scheduler and its engine in this process and steps them itself (`local_rank.py`).
Tensor-parallel ranks run in processes of their own, as they do under the server (`rank_group.py`).
Next to read: `portions.py`, `local_rank.py`, then `scheduler/scheduler.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minisgl.checkpoint import fetch_model
from minisgl.config import SchedulerConfig
from minisgl.core import IntArray, SamplingParams
from minisgl.errors import EngineFailed, InvalidRequest
from minisgl.llm.answers import (
    GenerationOutput,
    PartialAnswer,
    StreamOutput,
    TextReader,
    embedding_of,
)
from minisgl.llm.arguments import (
    Prompt,
    as_conversations,
    as_list,
    as_tools,
    check_options,
    list_params,
    prompt_is_named,
)
from minisgl.llm.claim import Claim
from minisgl.llm.interrupts import interrupts_wait
from minisgl.llm.local_rank import LocalRank
from minisgl.llm.portions import UnpostedPrompts
from minisgl.llm.rank_group import RankGroup
from minisgl.message import (
    AbortMsg,
    ChatMessage,
    Conversation,
    DetokenizeMsg,
    ExitMsg,
    UserMsg,
)
from minisgl.tokenizer import Tokenizer
from minisgl.utils.garbage import collect_later, keep_what_lives
from minisgl.utils.hardware import check_proc
from minisgl.utils.threads import lack_of_threads_is_explained

# All prompts are there at once, and no reader waits for a first answer or for single tokens.
_OFFLINE = {"schedule": "fcfs", "target_itl_ms": 0.0}


class LLM:
    """A model and its engine, for offline use. One thread at a time may use it.

    Use it as a context manager, or `close` it. Until then the garbage collector ignores all objects
    that exist when it is made, and so any cycle that contains it. During a step garbage collection
    is off in the whole process. With tp > 1 the calling script needs the usual
    `if __name__ == "__main__":` of multiprocessing.

    Args:
        model: a folder, a .gguf file, a hub id, or None for the default model.
        skip_tokenizer_init: take and give token ids only; texts stay empty.
        options: any field of `SchedulerConfig`; docs/features.md lists them. Unlike a server, it
            uses the schedule fcfs and no bound on the time of a step by default.

    Raises:
        ConfigError: an option or the model cannot work, or there is no /proc.
        EngineFailed: a rank did not start, the system has no thread left, or this process is a fork
            of one that has made an `LLM` with one rank.
    """

    def __init__(
        self, model: str | Path | None = None, *, skip_tokenizer_init: bool = False, **options: Any
    ) -> None:
        check_options(options)
        check_proc()
        if model is not None:
            model = str(model)
        config = SchedulerConfig(model=model, **{**_OFFLINE, **options})
        folder = fetch_model(config.model, config.model_source)
        config = config.fix_for_ranks(folder)
        self._uids = itertools.count()
        # By uid, where the outputs of a prompt go, until the last has come.
        self._open: dict[int, deque[DetokenizeMsg]] = {}
        self._failure: str | None = None
        self._claim = Claim(self._open)
        self._ranks: LocalRank | RankGroup
        with lack_of_threads_is_explained(), ExitStack() as stack:
            self._ranks = RankGroup(config) if config.tp > 1 else LocalRank(config)
            stack.enter_context(self._ranks)
            self._optional_tokenizer = None
            if not skip_tokenizer_init:
                self._optional_tokenizer = Tokenizer(folder, config.tokenizer_options)
            stack.enter_context(keep_what_lives())
            self._resources = stack.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Complete texts or token ids.

        Ctrl-C, or a handler of SIGALRM that raises, takes effect between two steps, and aborts all
        prompts. A second one breaks the step off, after which this object can only be closed.

        Args:
            prompts: one or several. A text gets the model's special tokens; ids are used as they
                are. They are integers in a list, a numpy array, or a tensor of the CPU. Of an array
                or a tensor with two dimensions each row is a prompt, padding included.
            sampling_params: for all prompts, or one for each.

        Returns:
            one output per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are refused; all prompts are aborted.
            EngineFailed: the engine died; close this object.
        """
        prompt_list = as_list(prompts)
        params_list = list_params(sampling_params, len(prompt_list))
        answers: dict[int, PartialAnswer] = {}
        # Only stop texts need the text at each step; otherwise a whole answer is decoded once.
        wants_text = any(params.stop for params in params_list)
        num_tokens = 0
        progress: AbstractContextManager[Any] = nullcontext()
        if use_tqdm:
            progress = tqdm(total=len(prompt_list), unit="prompt", dynamic_ncols=True)
        with (
            # Closed here: the traceback of an interrupt refers to it, and would keep it open.
            closing(self._run(prompt_list, params_list, wants_text=wants_text)) as outputs,
            progress as bar,
        ):
            for index, msg, text in outputs:
                if index not in answers:
                    answers[index] = PartialAnswer(params_list[index])
                answers[index].append(msg, text)
                num_tokens += len(msg.tokens)
                if bar is not None and msg.finish:
                    bar.update()
                    tokens_per_s = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{tokens_per_s:.0f} tok/s")
        detokenizer = None
        if self._optional_tokenizer is not None and not wants_text:
            detokenizer = self._optional_tokenizer.make_detokenizer()
        return [answers[index].output(detokenizer) for index in range(len(prompt_list))]

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[NDArray[np.float32]]:
        """Return a vector for each text or list of ids: the normed last hidden state, of length 1.

        Raises:
            RequestError: a prompt is refused.
            EngineFailed: the engine died; close this object.
        """
        prompt_list = as_list(prompts)
        params_list = [SamplingParams(max_tokens=0, embeds=True)] * len(prompt_list)
        embeddings = {}
        with closing(self._run(prompt_list, params_list, wants_text=False)) as outputs:
            for index, msg, _ in outputs:
                embedding = embedding_of(msg)
                assert embedding is not None
                embeddings[index] = embedding
        return [embeddings[index] for index in range(len(prompt_list))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamOutput]:
        """Like `generate`, step by step. Closing the generator aborts what has not finished.

        The first `next` is the first step. Prompts are read one portion before each step, so lists
        of ids must not change meanwhile.
        """
        prompt_list = as_list(prompts)
        params_list = list_params(sampling_params, len(prompt_list))
        return self._stream(prompt_list, params_list)

    def _stream(
        self, prompts: list[Prompt], params_list: Sequence[SamplingParams]
    ) -> Generator[StreamOutput]:
        has_stops = any(params.stop for params in params_list)
        wants_text = self._optional_tokenizer is not None or has_stops
        for index, msg, text in self._run(prompts, params_list, wants_text=wants_text):
            yield StreamOutput.of(index, msg, text, params_list[index])

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        use_tqdm: bool = False,
    ) -> list[GenerationOutput]:
        """Answer one conversation or several, through the model's chat template; see `generate`.

        Args:
            messages: with the server's roles; a content is a text or a list of text parts.
            tools: functions for the template, in OpenAI's format. Calls are part of the answer's
                text.
        """
        prompts = []
        tool_list = as_tools(tools)
        conversations = as_conversations(messages)
        for index, conversation in enumerate(conversations):
            chat = Conversation(conversation, tools=tool_list)
            with prompt_is_named(index, len(conversations)):
                prompts.append(self._tokenizer.encode(chat).tolist())
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End the other ranks and free the engine. May be called more than once.

        In a forked process it does nothing: all of it belongs to the process that made it.

        Raises:
            InvalidRequest: another thread is in a step.
        """
        if not self._ranks.is_running or not self._claim.is_of_this_process:
            return
        # After a step that was broken off, the last one may fail in any way.
        ignored = EngineFailed if self._failure is None else Exception
        with self._claim.stepping():
            try:
                self._ranks.post(ExitMsg())
                with suppress(ignored):
                    self._step_ranks()
            finally:
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

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._optional_tokenizer is None:
            raise InvalidRequest(
                "this LLM has no tokenizer (skip_tokenizer_init): prompts must be token ids, and "
                "there can be no stop texts"
            )
        return self._optional_tokenizer

    def _run(
        self, prompts: list[Prompt], params_list: Sequence[SamplingParams], *, wants_text: bool
    ) -> Generator[tuple[int, DetokenizeMsg, str]]:
        """Step until all prompts have finished. Closing the iterator aborts the others.

        Yields:
            the index of a prompt, its output of one step, and that output's text, if text is
            wanted.
        """
        reader = TextReader(self._tokenizer.make_detokenizer()) if wants_text else None
        self._check_usable()
        uids = [next(self._uids) for _ in prompts]
        unposted = UnpostedPrompts(uids, prompts, params_list, self._ids_of)
        unfinished = set(uids)
        unread: deque[DetokenizeMsg] = deque()
        try:
            self._open_for(uids, unread)
            while unfinished:
                while not unread:
                    self._check_usable()
                    with collect_later():
                        msgs = unposted.next_msgs()
                        with interrupts_wait():
                            self._post(msgs, unposted)
                            self._step(lambda: not unread)
                msg = unread.popleft()
                if msg.uid not in unfinished:  # computed after its stop text
                    continue
                text = ""
                if reader is not None:
                    msg, text = reader.read(msg)
                if msg.error is not None:
                    with prompt_is_named(unposted.index_of(msg.uid), len(prompts)):
                        raise msg.error.rebuild()
                if msg.finish:
                    unfinished.discard(msg.uid)
                    if msg.uid in self._open:  # a stop text, which the scheduler cannot see
                        self._ranks.post(AbortMsg(msg.uid))
                yield unposted.index_of(msg.uid), msg, text
        finally:
            try:
                self._end(uids, unposted)
            finally:  # an interrupt may have come just before interrupts wait
                self._end(uids, unposted)

    def _open_for(self, uids: list[int], unread: deque[DetokenizeMsg]) -> None:
        """Send the outputs of prompts to `unread`: those of all, or of none after an interrupt."""
        with self._claim.opening:
            self._claim.take()
            self._open.update(dict.fromkeys(uids, unread))

    def _end(self, uids: list[int], unposted: UnpostedPrompts) -> None:
        """Abort those prompts that are open; do nothing if none is."""
        if self._open.keys().isdisjoint(uids):
            return
        with interrupts_wait():
            for uid in unposted.uids:
                self._open.pop(uid, None)
            self._abort({uid for uid in uids if uid in self._open})

    def _post(self, msgs: list[UserMsg], unposted: UnpostedPrompts) -> None:
        """Queue a portion of prompts. If that is interrupted, this object can only be closed."""
        try:
            for msg in msgs:
                self._ranks.post(msg)
                unposted.forget_first()
        except BaseException:  # a second Ctrl-C: whether the last one is posted is not known
            self._failure = "prompts of this LLM were posted in part"
            raise

    def _ids_of(self, prompt: Prompt) -> Sequence[int] | IntArray:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return prompt

    def _check_usable(self) -> None:
        self._claim.check_process()
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if not self._ranks.is_running:
            raise EngineFailed("this LLM is closed")

    def _step(self, is_needed: Callable[[], bool]) -> None:
        """Make one step; file its outputs. The caller lets interrupts wait.

        Args:
            is_needed: asked when no other step can begin any more. The garbage collector may close
                a dropped stream at any moment before, whose steps may have ended all requests.
        """
        with self._claim.stepping():
            if not is_needed():
                return
            self._step_ranks()
            for msg in self._ranks.drain_outputs():
                self._open[msg.uid].append(msg)
                if msg.is_final:
                    del self._open[msg.uid]

    def _step_ranks(self) -> None:
        try:
            self._ranks.step()
        except EngineFailed as error:
            self._failure = str(error)
            raise
        except BaseException as error:  # also a second Ctrl-C: the step is half done
            self._failure = "a step of this LLM was broken off"
            if not isinstance(error, RuntimeError):  # what torch raises if the device fails
                raise
            raise EngineFailed(f"the engine failed: {error}") from error

    def _abort(self, uids: set[int]) -> None:
        """Abort requests, and step until the scheduler has ended them. Interrupts wait meanwhile.

        The garbage collector may close a dropped stream during a step. Then the aborts are only
        posted, and the steps that follow end the requests.
        """
        is_usable = self._failure is None and self._ranks.is_running
        if not is_usable or not self._claim.is_of_this_process:
            return
        for uid in sorted(uids):
            self._ranks.post(AbortMsg(uid))
        while uids & self._open.keys() and not self._claim.is_stepping:
            self._step(lambda: bool(uids & self._open.keys()))
