"""The routes: one function per route, from a request to an answer.

A request is refused before the first byte of its answer: a route waits for the first reply before
it begins a stream. `BodyRoute` calls the functions of requests with a body, FastAPI the others;
both give the same arguments. Next to read: `frontend.py`.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from minisgl.core import SamplingParams
from minisgl.errors import ResponseNotFound
from minisgl.message import Prompt
from minisgl.server.answers.builder import AnswerBuilder
from minisgl.server.answers.errors import ErrorResponse
from minisgl.server.anthropic import (
    CountTokensRequest,
    MessagesBuilder,
    MessagesRequest,
    TokenCount,
)
from minisgl.server.frontend import Frontend
from minisgl.server.http.access_log import note_generation
from minisgl.server.http.body import BodyRoute
from minisgl.server.http.client_watch import ClientWatch, run_while_connected
from minisgl.server.http.errors import errors_name_fields
from minisgl.server.http.key_salts import salt_by_key
from minisgl.server.http.openapi import (
    ERRORS,
    MESSAGE_ERRORS,
    MESSAGE_STREAMS,
    RESPONSE_OBJECT,
    STREAMS,
)
from minisgl.server.http.paths import HEALTH_PATH, METRICS_PATH
from minisgl.server.http.streaming import EventStream, JsonInPieces, whole_answer
from minisgl.server.native.generate import GenerateBuilder, Generated, GenerateRequest
from minisgl.server.native.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from minisgl.server.openai.chat import ChatBuilder, ChatCompletion, ChatRequest
from minisgl.server.openai.completions import Completion, CompletionBuilder, CompletionRequest
from minisgl.server.openai.embeddings import (
    EMBEDDING_SAMPLING,
    EmbeddingList,
    EmbeddingRequest,
    encode_embeddings,
)
from minisgl.server.openai.models import ModelCard, ModelList
from minisgl.server.openai.responses import InputTokens, ResponsesBuilder
from minisgl.server.openai.responses_request import InputTokensRequest, ResponsesRequest
from minisgl.server.peers import Peers
from minisgl.server.requests.generation_request import ConversationRequest, GenerationRequest
from minisgl.server.served_model import ServedModel
from minisgl.utils.excerpts import excerpt
from minisgl.version import __version__

open_router = APIRouter()  # its routes need no key
router = APIRouter(route_class=BodyRoute)


# `async`, because FastAPI would call plain functions in threads, and a request would wait for two.
async def _get_frontend(request: Request) -> Frontend:
    frontend: Frontend = request.app.state.frontend
    return frontend


async def _get_model(request: Request) -> ServedModel:
    model: ServedModel = request.app.state.model
    return model


FrontendDep: TypeAlias = Annotated[Frontend, Depends(_get_frontend)]
ModelDep: TypeAlias = Annotated[ServedModel, Depends(_get_model)]


@open_router.get(HEALTH_PATH, responses={503: ERRORS[503]})
async def health(frontend: FrontendDep) -> dict[str, str]:
    """200 while requests are accepted; the server listens only once they are."""
    if frontend.refusal:
        raise frontend.refusal
    return {"status": "ok"}


@router.get(METRICS_PATH, response_class=PlainTextResponse)
async def metrics(request: Request, frontend: FrontendDep) -> Response:
    """The numbers of all API processes."""
    peers: Peers | None = request.app.state.peers
    others = await peers.samples() if peers else []
    return Response(frontend.metrics.expose(others), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/v1/models", responses=ERRORS)
async def list_models(model: ModelDep) -> ModelList:
    return ModelList(data=[model.card], first_id=model.name, last_id=model.name)


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def retrieve_model(name: str, model: ModelDep) -> ModelCard:
    """Names may contain slashes, as ids of a hub do."""
    model.check_name(name)
    return model.card


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS)
async def chat_completions(
    body: ChatRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    inputs = _engine_inputs(body, frontend, model)
    builder = ChatBuilder(model.name, body, model.dialect)
    return await _answer(body, inputs, builder, request, frontend)


@router.post("/v1/completions", response_model=Completion, responses=STREAMS)
async def completions(
    body: CompletionRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    inputs = _engine_inputs(body, frontend, model)
    echoes = [""] * len(inputs.prompts)
    if body.echo:
        with errors_name_fields(body.field_of):
            texts = frontend.questions.prompt_texts_until(inputs.deadline, inputs.prompts)
            echoes = await run_while_connected(request, texts)
    builder = CompletionBuilder(model.name, body, echoes)
    return await _answer(body, inputs, builder, request, frontend)


@router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
async def embeddings(
    body: EmbeddingRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Response:
    model.check_name(body.model)
    body.check_dimensions(model.width)
    with errors_name_fields(lambda param: param or "input"):
        sampling = salt_by_key(request, EMBEDDING_SAMPLING)
        generation = frontend.submit(body.prompts(), sampling)
        note_generation(request.scope, generation)
        with closing(generation):
            replies = await run_while_connected(request, generation.collect())
    return JsonInPieces(await encode_embeddings(body, replies))


@router.post("/generate", response_model=Generated, responses=STREAMS)
async def generate(
    body: GenerateRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    inputs = _engine_inputs(body, frontend, model)
    builder = GenerateBuilder(model.name, body)
    return await _answer(body, inputs, builder, request, frontend)


# The document has the type of a response, but answers are not checked against it.
@router.post("/v1/responses", response_model=None, responses={**STREAMS, 200: RESPONSE_OBJECT})
async def responses(
    body: ResponsesRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    inputs = _engine_inputs(body, frontend, model)
    builder = ResponsesBuilder(model.name, body, inputs.sampling, model.dialect)
    return await _answer(body, inputs, builder, request, frontend)


@router.post("/v1/responses/input_tokens", responses=ERRORS)
async def input_tokens(
    body: InputTokensRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> InputTokens:
    return InputTokens(input_tokens=await _num_prompt_tokens(body, request, frontend, model))


@router.post(
    "/v1/responses/compact", status_code=404, response_model=ErrorResponse, responses=ERRORS
)
async def compact() -> None:
    raise HTTPException(404, "this server compacts no conversations")


@router.get("/v1/responses/{name}", status_code=404, response_model=ErrorResponse, responses=ERRORS)
@router.delete(
    "/v1/responses/{name}", status_code=404, response_model=ErrorResponse, responses=ERRORS
)
async def stored_response(name: str) -> None:
    raise ResponseNotFound(excerpt(name))


@router.post("/v1/messages", response_model=None, responses=MESSAGE_STREAMS)
async def messages(
    body: MessagesRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    inputs = _engine_inputs(body, frontend, model)
    builder = MessagesBuilder(model.name, body, model.dialect)
    return await _answer(body, inputs, builder, request, frontend)


@router.post("/v1/messages/count_tokens", responses=MESSAGE_ERRORS)
async def count_tokens(
    body: CountTokensRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> TokenCount:
    return TokenCount(input_tokens=await _num_prompt_tokens(body, request, frontend, model))


async def _num_prompt_tokens(
    body: ConversationRequest, request: Request, frontend: Frontend, model: ServedModel
) -> int:
    model.check_name(body.model)
    (prompt,) = body.prompts()
    with errors_name_fields(body.field_of):
        tokens = await run_while_connected(request, frontend.questions.encode(prompt))
    return len(tokens)


@router.post("/tokenize", response_model=Tokenized, responses=ERRORS)
async def tokenize(
    body: TokenizeRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Response:
    model.check_name(body.model)
    (prompt,) = body.prompts()
    with errors_name_fields(lambda param: param or body.given_field):
        encoding = frontend.questions.encode(prompt, add_special_tokens=body.add_special_tokens)
        tokens = await run_while_connected(request, encoding)
    # Encoded here: FastAPI would check each token of a long list, which would block the event loop.
    answer = {"tokens": tokens, "count": len(tokens), "max_model_len": model.max_seq_len}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize", responses=ERRORS)
async def detokenize(
    body: DetokenizeRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Detokenized:
    model.check_name(body.model)
    with errors_name_fields(lambda param: param or "tokens"):
        texts = frontend.questions.prompt_texts(body.prompts())
        (text,) = await run_while_connected(request, texts)
    return Detokenized(prompt=text)


class FlushedCache(BaseModel):
    num_tokens: int


@router.post("/flush_cache", responses=ERRORS)
async def flush_cache(request: Request, frontend: FrontendDep) -> FlushedCache:
    """Drop all cached prefixes that no request uses, of all API keys."""
    num_tokens = await run_while_connected(request, frontend.questions.flush_cache())
    return FlushedCache(num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class _EngineInputs:
    """The engine's inputs for a request, and when it ends with an error."""

    prompts: list[Prompt]
    sampling: SamplingParams
    deadline: float


def _engine_inputs(
    body: GenerationRequest, frontend: Frontend, model: ServedModel
) -> _EngineInputs:
    """Check a request. Its answer builder is made later: for too many prompts it would be large.

    Raises:
        RequestError: it names another model, or has too many prompts or an invalid parameter.
    """
    model.check_name(body.model)
    with errors_name_fields(body.field_of):
        prompts = body.prompts()
        frontend.check_num_answers(len(prompts), body.num_answers)
        sampling = body.sampling(model.sampling_defaults)
        if isinstance(body, ConversationRequest):
            sampling = model.dialect.constrain(
                sampling, body.tool_use, allows_reasoning=body.allows_reasoning
            )
    return _EngineInputs(prompts, sampling, frontend.new_deadline())


async def _answer(
    body: GenerationRequest,
    inputs: _EngineInputs,
    builder: AnswerBuilder,
    request: Request,
    frontend: Frontend,
) -> Any:
    """Submit the prompts, wait for the first replies, then stream the answer or collect it."""
    with errors_name_fields(body.field_of):
        sampling = salt_by_key(request, inputs.sampling)
        generation = frontend.submit(
            inputs.prompts, sampling, body.num_answers, deadline=inputs.deadline
        )
        note_generation(request.scope, generation, builder.finish_reasons)
        watch = ClientWatch(request, generation)
        try:
            await generation.wait_for_first_replies()
            if body.stream:
                return EventStream(builder, generation, frontend.metrics, watch)
            await builder.read_to_end(generation)
            watch.stop()
            return await whole_answer(builder)
        except BaseException:
            watch.stop()
            generation.close()
            raise
