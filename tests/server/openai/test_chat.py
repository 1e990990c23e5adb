"""Chat completions: the objects and chunks of an answer."""

from __future__ import annotations

import json

from tests.server.harness import (
    CHAT,
    App,
    answer_in_pieces,
    run_with_app,
    token_replies,
)


def test_a_whole_chat_answer_is_openais_object() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("Hel", "", "lo 👍", num_prompt=5, num_cached=4))
        call = app.post(CHAT)
        await call.done
        assert call.status == 200
        answer = json.loads(call.body)
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        message = {"role": "assistant", "content": "Hello 👍", "refusal": None}
        assert answer == {
            "object": "chat.completion",
            "model": "m",
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }

    run_with_app(scenario)


def test_a_chat_stream_byte_by_byte() -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, stream=True)
        await answer_in_pieces(app.worker, call, "Hé", "", "\n\nline\r\u2028")
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert call.headers["cache-control"] == "no-cache"
        first = json.loads(call.chunks[0].removeprefix(b"data: "))
        head = (
            f'"id":"{first["id"]}","object":"chat.completion.chunk",'
            f'"created":{first["created"]},"model":"m"'
        )

        def event(delta: str, finish: str) -> str:
            choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'
            return f'data: {{{head},"choices":[{choice}]}}\n\n'

        assert call.body.decode() == (
            event('{"role":"assistant","content":""}', "null")
            + event('{"content":"Hé"}', "null")
            + event('{"content":"\\n\\nline\\r\\u2028"}', "null")
            + event("{}", '"stop"')
            + "data: [DONE]\n\n"
        )

    run_with_app(scenario)
