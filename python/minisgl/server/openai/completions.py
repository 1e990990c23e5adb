"""POST /v1/completions: the request, the objects of an answer, and their builder.

Reference: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from minisgl.message import Prompt, TextLogprobs
from minisgl.server.answers.builder import ChoicesBuilder, ParsedReply
from minisgl.server.answers.objects import ChoiceFinishReason, ResponseModel, Usage, reply_logprobs
from minisgl.server.requests.generation_request import (
    ChoicesRequest,
    Prompts,
    check_max_tokens,
    parse_prompts,
)
from minisgl.server.requests.unsupported import EmptyListOnly, EmptyObjectOnly, Refused, TrueOnly
from minisgl.server.requests.validation import Integer, NeutralOnly

DEFAULT_MAX_TOKENS = 16
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionRequest(ChoicesRequest):
    """POST /v1/completions. Several prompts give several choices."""

    model: str
    prompt: Prompts
    max_tokens: Integer | None = DEFAULT_MAX_TOKENS
    logprobs: Integer | None = None
    echo: bool | None = None

    # Fields of other endpoints and servers.
    add_special_tokens: TrueOnly = None
    audio: Refused = None
    chat_template_kwargs: EmptyObjectOnly = None
    function_call: Annotated[Any, NeutralOnly("none", "auto")] = None
    functions: EmptyListOnly = None
    max_completion_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    messages: Annotated[Any, NeutralOnly(instead="prompt")] = None
    modalities: Annotated[Any, NeutralOnly(["text"])] = None
    prompt_logprobs: Annotated[Any, NeutralOnly(instead="echo and logprobs")] = None
    reasoning_effort: Refused = None
    tool_choice: Annotated[Any, NeutralOnly("none", "auto")] = None
    tools: EmptyListOnly = None
    top_logprobs: Annotated[Any, NeutralOnly(0, instead="logprobs")] = None
    verbosity: Annotated[Any, NeutralOnly("medium")] = None
    web_search_options: Refused = None

    def read_prompts(self) -> list[Prompt]:
        return parse_prompts(self.prompt)

    @property
    def token_limit(self) -> int | None:
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return limit if self.echo else check_max_tokens(limit)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """A prompt that is echoed has as many log probabilities a token as the answer."""
        return self.logprobs if self.echo else None


class CompletionLogprobs(ResponseModel):
    """Parallel lists, an entry a token; `text_offset` counts characters of the tokens before.

    Nothing predicts the first token of a prompt: there is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChoiceFinishReason


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionBuilder(ChoicesBuilder):
    """Builds a `Completion`, or chunks.

    Args:
        echoes: what the answers to each prompt begin with.
    """

    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def __init__(self, model: str, request: CompletionRequest, echoes: list[str]) -> None:
        super().__init__(model, request, num_prompts=len(echoes))
        self._echoes = echoes
        # Characters before the next token that has log probabilities.
        self._text_offsets = [len(self._echo(index)) for index in range(len(self._outputs))]
        if request.num_prompt_logprobs is not None:
            self._text_offsets = [0] * len(self._outputs)
        # A character that is spread over several tokens counts with the token that completes it,
        # and the U+FFFD of one that is broken with the tokens that have begun it.
        self._utf8_decoders = [_Utf8Decoder(errors="replace") for _ in self._outputs]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._num_answers]

    def first_choices(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        return [_chunk_choice(index, echo)] if echo else []

    def reply_choices(self, parsed: ParsedReply) -> list[dict[str, Any]]:
        reply = parsed.reply
        tokens = reply_logprobs(reply)
        if not (reply.text or reply.finish or tokens):
            return []
        choice = _chunk_choice(parsed.index, reply.text)
        choice["finish_reason"] = reply.finish
        if tokens:
            num_prompt = len(reply.prompt_logprobs or ())
            choice["logprobs"] = self._next_logprobs(parsed.index, tokens, num_prompt).model_dump()
        return [choice]

    def _next_logprobs(
        self, index: int, tokens: list[TextLogprobs], num_prompt: int
    ) -> CompletionLogprobs:
        """Log probabilities of the next tokens of a choice. Advances its text offset.

        Args:
            num_prompt: how many of them are the prompt's. A character does not go on behind it.
        """
        utf8 = self._utf8_decoders[index]
        offsets: list[int] = []
        for number, token in enumerate(tokens, start=1):
            held, _ = utf8.getstate()
            is_behind_broken = bool(held) and _breaks(token.token, held)
            offsets.append(self._text_offsets[index] + is_behind_broken)
            text = utf8.decode(token.token, final=number == num_prompt)
            self._text_offsets[index] += len(text)
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[_top(token) for token in tokens],
            text_offset=offsets,
        )

    def build(self) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index) for index in range(len(self._outputs))],
            usage=self.usage(),
        )

    def _choice(self, index: int) -> CompletionChoice:
        logprobs = None
        if self._has_logprobs:
            has_prompt = self._request.num_prompt_logprobs is not None
            num_prompt = self._last_replies[index].num_prompt if has_prompt else 0
            logprobs = self._next_logprobs(index, self._logprobs[index], num_prompt)
        return CompletionChoice(
            index=index,
            text=self._echo(index) + self._outputs[index].content,
            logprobs=logprobs,
            finish_reason=self.finish_reason(index),
        )


def _breaks(token: bytes, begun: bytes) -> bool:
    """Whether a token does not go on with the character that bytes before it have begun."""
    begin = begun + token[:1]
    try:
        begin.decode()
    except UnicodeDecodeError as error:
        return error.end < len(begin)  # else it lacks bytes
    return False


def _chunk_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _top(token: TextLogprobs) -> dict[str, float] | None:
    """The likeliest texts, and behind them the token's own if it is none of them.

    Parts of characters have one text: of these the likeliest counts.
    """
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, logprob in (*token.top_texts, (token.text, token.logprob)):
        top.setdefault(text, logprob)
    return top
