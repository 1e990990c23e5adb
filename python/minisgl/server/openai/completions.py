"""POST /v1/completions: the request, the objects of an answer, and their builder.

Reference: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

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
    """Parallel lists, one entry per token; `text_offset` is where its text begins in the choice.

    Nothing predicts the first token of a prompt: its entry is null.
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
            choice["logprobs"] = self._token_logprobs(parsed.index, tokens, num_prompt).model_dump()
        return [choice]

    def _token_logprobs(
        self, index: int, tokens: list[TextLogprobs], num_prompt: int
    ) -> CompletionLogprobs:
        """Log probabilities of tokens of a choice, the first `num_prompt` of them the prompt's."""
        echo = self._echo(index)
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[_top(token) for token in tokens],
            text_offset=[
                *_offsets_in(echo, tokens[:num_prompt]),
                *(len(echo) + token.start for token in tokens[num_prompt:]),
            ],
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
            logprobs = self._token_logprobs(index, self._logprobs[index], num_prompt)
        return CompletionChoice(
            index=index,
            text=self._echo(index) + self._outputs[index].content,
            logprobs=logprobs,
            finish_reason=self.finish_reason(index),
        )


def _offsets_in(echo: str, prompt: list[TextLogprobs]) -> list[int]:
    """Where the tokens of a prompt begin in its text.

    That may lack what the tokenizer puts before it, as <s> or a space.
    """
    if not prompt:
        return []
    last = prompt[-1]
    num_lacking = max(0, last.start + len(last.text) - len(echo))
    return [max(0, token.start - num_lacking) for token in prompt]


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
