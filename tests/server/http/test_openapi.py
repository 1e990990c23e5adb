"""The OpenAPI document against real answers: neither has a field that the other has not."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from fastapi.routing import APIRoute

from minisgl.message import CodecReply, ReplyError, TextLogprobs, TokenizeMsg, UserReply, pack_ids
from minisgl.server.http.routes import open_router, router
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from tests.server.harness import (
    CHAT,
    CONFIG,
    MODEL,
    RESPONSES,
    TEXT,
    App,
    HttpCall,
    Script,
    run_with_app,
    wait_until,
)
from tests.server.openai.test_responses import events_of

GENERATE = "/generate"
EMBED = "/v1/embeddings"
STREAMING = {CHAT, TEXT, RESPONSES, GENERATE, "/v1/messages"}
ONLY_IF_ANY = {
    "AssistantMessage": {"reasoning_content", "tool_calls"},
    "MessageErrorBody": {"details"},
    "MessageErrorResponse": {"request_id"},
    "OutputCall": {"namespace"},
}
SPEAKER = replace(
    MODEL,
    dialect=Dialect(TOOL_FORMATS["hermes"](""), REASONING_FORMATS["qwen3"], {"<tool_call>": 7}),
)
FUNCTION = {"name": "get", "description": "d", "parameters": {"type": "object"}}
SAID = [
    "<think>\nHm.\n</think>\n\n",
    "Hi",
    '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>',
]
LIKELY = TextLogprobs(b"a", -0.5, [(b"a", -0.5), (b"b", -1.0)])
PROMPT = [TextLogprobs(b"a", None, []), LIKELY]
FLAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
USED: dict[str, Any] = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "logprobs": True,
    "top_logprobs": 2,
}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, USED),
    (TEXT, {"logprobs": 2, "echo": True}),
    (TEXT, {}),
    (GENERATE, {"prompt": "a", "logprobs": 2, "prompt_logprobs": 1}),
    (GENERATE, {"prompt": "a"}),
    (RESPONSES, {}),
    (
        RESPONSES,
        {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "get"},
        },
    ),
    (
        RESPONSES,
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}},
    ),
    (RESPONSES, {"text": {"format": FLAT}, "instructions": "i", "max_output_tokens": 3}),
    (EMBED, {"model": "m", "input": "a"}),
    (EMBED, {"model": "m", "input": "a", "encoding_format": "base64"}),
]


def answer_script(finish: Any, *, logprobs: bool) -> Script:
    """A thought, a text and a call; or a vector."""

    def script(msg: TokenizeMsg) -> list[UserReply]:
        if msg.sampling.embeds:
            return [UserReply(msg.uid, finish="length", num_prompt=1, embedding=bytes(8))]
        tokens = [LIKELY] if logprobs else []
        of_prompt = PROMPT if msg.sampling.prompt_logprobs is not None else None
        begin = UserReply(msg.uid, SAID[0], logprobs=tokens, prompt_logprobs=of_prompt)
        return [
            begin,
            *(UserReply(msg.uid, text, logprobs=tokens) for text in SAID[1:]),
            UserReply(msg.uid, finish=finish, num_prompt=2, num_output=3),
        ]

    return script


def closed(node: Any) -> Any:
    """The schemas, allowing no field that they do not name."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    more = {"additionalProperties": False} if isinstance(node.get("properties"), dict) else {}
    return {name: closed(item) for name, item in node.items()} | more


async def document_of(app: App) -> dict[str, Any]:
    call = app.call("GET", "/openapi.json")
    await call.done
    document: dict[str, Any] = json.loads(call.body)
    return document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """That of all servers, since it depends on no model."""
    documents: list[dict[str, Any]] = []

    async def scenario(app: App) -> None:
        documents.append(await document_of(app))

    run_with_app(scenario)
    return documents[0]


def check(document: dict[str, Any], schema: dict[str, Any], answer: Any) -> None:
    jsonschema_rs.validate({**schema, "components": closed(document["components"])}, answer)


def check_call(document: dict[str, Any], path: str, call: HttpCall, method: str = "post") -> None:
    declared = document["paths"][path][method]["responses"][str(call.status)]["content"]
    check(document, declared[call.headers["content-type"]]["schema"], json.loads(call.body))


def output_schemas(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that answers are made of, by name."""
    schemas = document["components"]["schemas"]
    seen: set[str] = set()
    texts = [
        json.dumps(way["responses"]) for ways in document["paths"].values() for way in ways.values()
    ]
    while texts:
        text = texts.pop()
        for name in schemas:
            if name not in seen and f'"#/components/schemas/{name}"' in text:
                seen.add(name)
                texts.append(json.dumps(schemas[name]))
                yield name, schemas[name]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_whole_answers_are_as_declared(
    document: dict[str, Any], path: str, fields: dict[str, Any], finish: Any
) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(
            answer_script(finish, logprobs="logprobs" in fields or "include" in fields)
        )
        call = app.post(path, **fields)
        await call.done
        assert call.status == 200, call.body
        check_call(document, path, call)
        if fields is USED:
            message = json.loads(call.body)["choices"][0]["message"]
            assert message.keys() >= ONLY_IF_ANY["AssistantMessage"]
            spoilt = {**json.loads(call.body), "more": 1}
            with pytest.raises(jsonschema_rs.ValidationError, match="more"):
                check(document, {"$ref": "#/components/schemas/ChatCompletion"}, spoilt)

    run_with_app(scenario, model=SPEAKER)


@pytest.mark.parametrize("error", [None, ReplyError(500, "internal_error", "oh")])
def test_responses_in_events_are_as_declared_too(
    document: dict[str, Any], error: ReplyError | None
) -> None:
    async def scenario(app: App) -> None:
        last = {"finish": "stop"} if error is None else {"error": error}
        call = app.post(RESPONSES, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "a"))
        await wait_until(lambda: bool(call.chunks))
        app.worker.send(UserReply(uid, **last))
        await call.done
        found = [
            event["response"] for event in events_of(call.body.decode()) if "response" in event
        ]
        assert [response["status"] for response in found[1:]] == [
            "in_progress",
            "failed" if error else "completed",
        ]
        for response in found:
            check(document, {"$ref": "#/components/schemas/ResponseObject"}, response)

    run_with_app(scenario)


def test_the_other_routes_and_errors_are_as_declared(document: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        for path, body, reply in (
            ("/tokenize", {"prompt": "a"}, {"ids": pack_ids([1, 2])}),
            ("/detokenize", {"tokens": [1]}, {"text": "a"}),
        ):
            call = app.post(path, **body)
            app.worker.send_message(CodecReply((await app.worker.receive()).uid, **reply))
            await call.done
            assert call.status == 200
            check_call(document, path, call)
        for path in [*STREAMING, EMBED, "/tokenize", "/detokenize"]:
            call = app.post(path, model=5)
            await call.done
            assert call.status == 400
            check_call(document, path, call)
        for method, path, declared in (
            ("get", "/health", "/health"),
            ("get", "/version", "/version"),
            ("get", "/v1/models", "/v1/models"),
            ("get", "/v1/models/m", "/v1/models/{name}"),
            ("get", "/v1/models/x", "/v1/models/{name}"),
            ("get", "/v1/responses/x", "/v1/responses/{name}"),
            ("delete", "/v1/responses/x", "/v1/responses/{name}"),
        ):
            call = app.call(method.upper(), path)
            await call.done
            check_call(document, declared, call, method)

    run_with_app(scenario)


@pytest.mark.parametrize("keys", [(), ("sk",)])
def test_keys_are_declared_where_they_are_wanted_and_422_nowhere(keys: tuple[str, ...]) -> None:
    async def scenario(app: App) -> None:
        headers = [(b"authorization", b"Bearer sk")]
        call = app.call("GET", "/openapi.json", headers=headers)
        await call.done
        document = json.loads(call.body)
        operations = {
            path: way for path, ways in document["paths"].items() for way in ways.values()
        }
        guarded = {path for path, way in operations.items() if way.get("security")}
        assert guarded == {path for path, way in operations.items() if "401" in way["responses"]}
        assert guarded == (operations.keys() - {"/health"} if keys else set())
        assert not any("422" in way["responses"] for way in operations.values())
        schemes = document["components"].get("securitySchemes", {})
        assert schemes == ({"HTTPBearer": {"type": "http", "scheme": "bearer"}} if keys else {})
        if not keys:
            assert '"401"' not in call.body.decode()
            assert "security" not in call.body.decode()

    run_with_app(scenario, config=replace(CONFIG, api_key=keys))


@pytest.mark.filterwarnings("error")
def test_what_an_answer_has_is_required_and_streams_are_declared() -> None:
    async def scenario(app: App) -> None:
        document = await document_of(app)
        taken = {f"{name}-Output" for name in ("TextOptions",)}
        for name, schema in output_schemas(document):
            if name.endswith("Input") or "additionalProperties" in schema or name in taken:
                continue  # echoed as it came in
            optional = schema.get("properties", {}).keys() - set(schema.get("required", ()))
            assert optional == ONLY_IF_ANY.get(name, set()), name
        for path, ways in document["paths"].items():
            content = (
                ways.get("post", ways.get("get"))["responses"].get("200", {}).get("content", {})
            )
            assert ("text/event-stream" in content) == (path in STREAMING), path
            assert all(media["schema"] for media in content.values()), path
        assert "HTTPValidationError" not in document["components"]["schemas"]

    run_with_app(scenario)


def test_the_document_is_made_once_and_not_in_the_event_loop() -> None:
    async def scenario(app: App) -> None:
        makers: list[str] = []
        make = app.app.openapi

        def note_thread() -> dict[str, Any]:
            makers.append(threading.current_thread().name)
            return make()

        app.app.openapi = note_thread  # type: ignore[method-assign]
        calls = [app.call("GET", "/openapi.json") for _ in range(3)]
        await asyncio.gather(*(call.done for call in calls))
        assert len({call.body for call in calls}) == 1
        assert len(makers) == 1
        assert makers[0] != threading.current_thread().name

    run_with_app(scenario)


def test_nothing_that_a_request_depends_on_waits_for_a_thread() -> None:
    for route in [*open_router.routes, *router.routes]:
        assert isinstance(route, APIRoute)
        for dependency in route.dependant.dependencies:
            assert inspect.iscoroutinefunction(dependency.call), route.path
