"""The routes: HTTP in, OpenAI's objects out.

Knows the frontend and the protocol; nothing of tokens or processes. A request is refused before the first byte of an
answer: handlers wait for the first reply before they begin a stream. Errors are OpenAI's error objects. Next to read:
`frontend.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, RequestError, ResponseNotFound, UnknownModel
from minisgl.message import Prompt
from minisgl.server.frontend import Frontend, Generation
from minisgl.server.http.metrics import Metrics
from minisgl.server.http.middleware import ApiKey, BodyLimit, RequestCount
from minisgl.server.http.openapi import ERRORS, STREAMS, WITH_KEY, DocumentedApp
from minisgl.server.native.generate import GenerateAnswer, Generated, GenerateRequest
from minisgl.server.native.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from minisgl.server.openai.builder import Answer, ChatAnswer, CompletionAnswer, error_response
from minisgl.server.openai.common import (
    ChatCompletion,
    Completion,
    ErrorBody,
    ErrorResponse,
    ModelCard,
    ModelList,
)
from minisgl.server.openai.embeddings import ONLY_EMBED, EmbeddingList, EmbeddingRequest
from minisgl.server.openai.generation_request import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from minisgl.server.openai.responses import ResponsesAnswer
from minisgl.server.openai.responses_objects import ResponseObject
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.openai.validation import path_of
from minisgl.server.parsing import Dialect
from minisgl.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CLIENT_CLOSED_REQUEST = 499
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API says of the model.

    Attributes:
        sampling_defaults: the model's recommendation for what a request leaves open.
        created: when it was loaded, in seconds since the epoch.
        width: of its hidden states.
        dialect: how it spells calls and thoughts.
    """

    name: str
    max_seq_len: int
    sampling_defaults: dict[str, float]
    created: int
    width: int
    dialect: Dialect = field(default_factory=Dialect)

    @property
    def card(self) -> ModelCard:
        return ModelCard(id=self.name, created=self.created, max_model_len=self.max_seq_len)

    def check_name(self, name: str | None) -> None:
        """
        Raises:
            UnknownModel: there is a name and it is not this model's.
        """
        if name is not None and name != self.name:
            raise UnknownModel(name, self.name)


def create_app(
    frontend: Frontend,
    model: ServedModel,
    max_body_bytes: int,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """The application, over a frontend that runs in the same event loop.

    Args:
        api_keys: those that requests may bring; without any, none is asked for.
        cors_origins: those whose pages may call it from a browser; "*" is all.
    """
    app = DocumentedApp(title="Mini-SGLang", version=__version__, redoc_url=None)
    app.state.frontend = frontend
    app.state.model = model
    app.add_middleware(
        BodyLimit, max_bytes=max_body_bytes
    )  # the last to be added is the first to see a request
    if api_keys:
        app.add_middleware(ApiKey, keys=api_keys, metrics=frontend.metrics)
    if cors_origins:  # before the keys: a browser asks without one whether it may send one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(RequestCount, metrics=frontend.metrics)
    for kind, handler in (
        (RequestError, _on_our_error),
        (EngineFailed, _on_our_error),
        (RequestValidationError, _on_invalid_body),
        (HTTPException, _on_http_error),
        (ClientDisconnect, _on_disconnect),
        (Exception, _on_bug),
    ):
        app.add_exception_handler(kind, handler)
    app.add_api_route("/health", health, responses={503: ERRORS[503]})
    router = APIRouter()
    get, post = (partial(router.add_api_route, methods=[method]) for method in ("GET", "POST"))
    get("/metrics", metrics, response_class=PlainTextResponse)
    get("/version", version)
    get("/v1/models", list_models, responses=ERRORS)
    get("/v1/models/{name:path}", retrieve_model, responses=ERRORS)
    post("/v1/chat/completions", chat_completions, response_model=ChatCompletion, responses=STREAMS)
    post("/v1/completions", completions, response_model=Completion, responses=STREAMS)
    post("/v1/embeddings", embeddings, responses=ERRORS)
    post("/generate", generate, response_model=Generated, responses=STREAMS)
    whole = {"model": ResponseObject, **STREAMS[200]}  # told, not checked at each answer
    post("/v1/responses", responses, response_model=None, responses={**STREAMS, 200: whole})
    none_stored: dict[str, Any] = {
        "status_code": 404,
        "response_model": ErrorResponse,
        "responses": ERRORS,
    }
    for method in ("GET", "DELETE"):
        router.add_api_route(
            "/v1/responses/{name}", stored_response, methods=[method], **none_stored
        )
    post("/tokenize", tokenize, responses=ERRORS)
    post("/detokenize", detokenize, responses=ERRORS)
    app.include_router(router, **(WITH_KEY if api_keys else {}))
    return app


def _get_frontend(request: Request) -> Frontend:
    frontend: Frontend = request.app.state.frontend
    return frontend


def _get_model(request: Request) -> ServedModel:
    model: ServedModel = request.app.state.model
    return model


FrontendDep = Annotated[Frontend, Depends(_get_frontend)]
ModelDep = Annotated[ServedModel, Depends(_get_model)]


async def health(frontend: FrontendDep) -> dict[str, str]:
    """200 while the engine can answer; the server listens only once it can."""
    if frontend.failure:
        raise frontend.failure
    return {"status": "ok"}


async def metrics(frontend: FrontendDep) -> Response:
    return Response(frontend.metrics.expose(), media_type=CONTENT_TYPE_LATEST)


async def version() -> dict[str, str]:
    return {"version": __version__}


async def list_models(model: ModelDep) -> ModelList:
    return ModelList(data=[model.card])


async def retrieve_model(name: str, model: ModelDep) -> ModelCard:
    """Names may contain slashes, as ids of a hub do."""
    model.check_name(name)
    return model.card


async def chat_completions(
    body: ChatRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    return await _answer(
        body,
        request,
        frontend,
        model,
        lambda prompts, _: ChatAnswer(model.name, body, prompts, model.dialect),
    )


async def completions(
    body: CompletionRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    model.check_name(body.model)
    with _naming(body.field_of):
        echoes = (
            await _unless_disconnected(request, frontend.texts(body.prompts()))
            if body.echo
            else None
        )

    return await _answer(
        body,
        request,
        frontend,
        model,
        lambda prompts, _: CompletionAnswer(model.name, body, prompts, echoes),
    )


async def responses(
    body: ResponsesRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    return await _answer(
        body,
        request,
        frontend,
        model,
        lambda prompts, sampling: ResponsesAnswer(
            model.name, body, prompts, sampling, model.dialect
        ),
    )


async def stored_response(name: str) -> None:
    raise ResponseNotFound(name)


async def generate(
    body: GenerateRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Any:
    return await _answer(
        body, request, frontend, model, lambda prompts, _: GenerateAnswer(model.name, body, prompts)
    )


async def embeddings(
    body: EmbeddingRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> EmbeddingList:
    model.check_name(body.model)
    body.check_dimensions(model.width)
    with (
        _naming(lambda param: param or "input"),
        closing(frontend.submit(body.prompts(), ONLY_EMBED)) as generation,
    ):
        return EmbeddingList.of(body, await _unless_disconnected(request, generation.collect()))


async def tokenize(
    body: TokenizeRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Tokenized:
    model.check_name(body.model)
    encoding = frontend.encode(body.content(), add_special_tokens=body.add_special_tokens)
    tokens = await _unless_disconnected(request, encoding)
    return Tokenized(tokens=tokens, count=len(tokens), max_model_len=model.max_seq_len)


async def detokenize(
    body: DetokenizeRequest, request: Request, frontend: FrontendDep, model: ModelDep
) -> Detokenized:
    model.check_name(body.model)
    with _naming(lambda param: param or "tokens"):
        return Detokenized(prompt=await _unless_disconnected(request, frontend.decode(body.tokens)))


@contextmanager
def _naming(field_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """What is wrong with a prompt or a grammar is said of the field in which the client sent it."""
    try:
        yield
    except RequestError as error:
        if error.status == 400:
            error.param = field_of(error.param)
        raise


async def _answer(
    body: GenerationRequest,
    request: Request,
    frontend: Frontend,
    model: ServedModel,
    make_answer: Callable[[list[Prompt], SamplingParams], Answer],
) -> Any:
    """Submit, wait for the first reply, then stream or collect."""
    model.check_name(body.model)
    with _naming(body.field_of):
        prompts = body.prompts()
        sampling = body.constrain(body.sampling(model.sampling_defaults), model.dialect)
        answer = make_answer(prompts, sampling)
        generation = frontend.submit(prompts, sampling, body.num_answers)
        try:
            await _unless_disconnected(request, answer.begin(generation))
            if body.stream:
                return _EventStream(answer, generation, frontend.metrics)
            await _unless_disconnected(request, answer.finish(generation))
            return answer.whole()
        except BaseException:
            generation.close()
            raise


class _EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, the request does not outlive it."""

    def __init__(self, answer: Answer, generation: Generation, metrics: Metrics) -> None:
        events = answer.events(generation)
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._generation = generation
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
            if self._generation.error:
                self._metrics.count_error(self._generation.error.code)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; what it comes to.

    Raises:
        ClientDisconnect: the client went away first; the work was cancelled.
    """
    task, watcher = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _respond(request: Request, status: int, content: ErrorResponse) -> Response:
    _get_frontend(request).metrics.count_error(content.error.code or f"http_{status}")
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 429 else None
    return JSONResponse(content.model_dump(), status, headers)


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineFailed)
    return _respond(
        request, 503 if isinstance(error, EngineFailed) else error.status, error_response(error)
    )


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    paths = [(path_of(fault, error.body), fault) for fault in error.errors()]
    # of the branches of a union, the one that goes farthest, and rather one whose type is right
    path, fault = max(paths, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    param = ".".join(path) or None
    said = str(fault["msg"]).removeprefix("Value error, ")
    message = f"{param}: {said}" if param else said
    body = ErrorBody(
        message=message, type="invalid_request_error", param=param, code=str(fault["type"])
    )
    return _respond(request, 400, ErrorResponse(error=body))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f" ({request.method} {request.url.path})" if error.status_code in (404, 405) else ""
    body = ErrorBody(message=f"{error.detail}{where}", type="invalid_request_error")
    return _respond(request, error.status_code, ErrorResponse(error=body))


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s fails", request.method, request.url.path, exc_info=error)
    body = ErrorBody(message="internal server error", type="server_error")
    return _respond(request, 500, ErrorResponse(error=body))
