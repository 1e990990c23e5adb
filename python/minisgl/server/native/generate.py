"""POST /generate, which is not OpenAI's: one prompt with the names of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from minisgl.message import Prompt, TextLogprobs
from minisgl.server.answers.builder import AnswerBuilder, ParsedReply, data_event
from minisgl.server.answers.objects import ChoiceFinishReason, ResponseModel, Usage, reply_logprobs
from minisgl.server.requests.generation_request import (
    GenerationRequest,
    PromptIds,
    parse_prompts,
)
from minisgl.server.requests.unsupported import (
    EmptyListOnly,
    EmptyObjectOnly,
    FalseOnly,
    OneOnly,
    TrueOnly,
)
from minisgl.server.requests.validation import Integer, NeutralOnly, ValidText


class GenerateRequest(GenerationRequest):
    """A text gets the model's special tokens, ids are taken as they are."""

    prompt: ValidText | PromptIds
    max_tokens: Integer | None = None
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None

    # Fields of other endpoints and servers.
    add_special_tokens: TrueOnly = None
    best_of: OneOnly = None
    embeds: FalseOnly = None
    inputs: Annotated[Any, NeutralOnly(instead="prompt")] = None
    logprob_start_len: Annotated[Any, NeutralOnly(-1, instead="prompt_logprobs")] = None
    max_completion_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    messages: Annotated[Any, NeutralOnly(instead="prompt")] = None
    n: OneOnly = None
    parameters: EmptyObjectOnly = None
    response_format: Annotated[Any, NeutralOnly({"type": "text"}, instead="guided_json")] = None
    return_logprob: Annotated[Any, NeutralOnly(False, instead="logprobs")] = None
    text: Annotated[Any, NeutralOnly(instead="prompt")] = None
    tools: EmptyListOnly = None
    top_logprobs_num: Annotated[Any, NeutralOnly(0, instead="logprobs")] = None

    def read_prompts(self) -> list[Prompt]:
        return parse_prompts(self.prompt)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


class TokenLogprob(ResponseModel):
    """A token and the likeliest at its position; null for the first of a prompt."""

    token: str
    logprob: float | None
    top: list[tuple[str, float]]

    @classmethod
    def of(cls, token: TextLogprobs) -> TokenLogprob:
        return cls(token=token.text, logprob=token.logprob, top=token.top_texts)


class Generated(ResponseModel):
    text: str
    finish_reason: ChoiceFinishReason
    prompt_logprobs: list[TokenLogprob] | None = None
    logprobs: list[TokenLogprob] | None = None
    usage: Usage


class GenerateBuilder(AnswerBuilder):
    """Each event has the new text. The last one has the finish reason and the usage too."""

    id_prefix = "gen-"

    def reply_events(self, parsed: ParsedReply) -> Iterable[bytes]:
        reply = parsed.reply
        if not (reply.text or reply.finish or reply_logprobs(reply)):
            return []
        event: dict[str, Any] = {"text": reply.text, "finish_reason": reply.finish}
        if reply.prompt_logprobs:
            event["prompt_logprobs"] = _logprob_objects(reply.prompt_logprobs)
        if reply.logprobs:
            event["logprobs"] = _logprob_objects(reply.logprobs)
        if reply.finish:
            event["usage"] = self.usage().model_dump()
        return [data_event(event)]

    def last_events(self) -> Iterable[bytes]:
        return [b"data: [DONE]\n\n"]

    def build(self) -> Generated:
        usage = self.usage()
        tokens = [TokenLogprob.of(token) for token in self._logprobs[0]]
        # Only the first token of a prompt has no log probability.
        has_prompt = bool(tokens) and tokens[0].logprob is None
        num_prompt = usage.prompt_tokens if has_prompt else 0
        return Generated(
            text=self._outputs[0].content,
            finish_reason=self.finish_reason(0),
            prompt_logprobs=tokens[:num_prompt] or None,
            logprobs=tokens[num_prompt:] if self._has_logprobs else None,
            usage=usage,
        )


def _logprob_objects(tokens: list[TextLogprobs]) -> list[dict[str, Any]]:
    return [TokenLogprob.of(token).model_dump() for token in tokens]
