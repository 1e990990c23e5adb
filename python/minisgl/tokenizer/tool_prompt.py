"""Tools in prompts: whether a chat template shows them, and how they are shown if it does not.

Some templates show no tools to the model, and some write calls in a form that is not parsed. For
these, tools are described in a system text, and calls and results of earlier turns become text,
all in the form on which Hermes and Qwen2.5 are trained. Most other models can follow it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any

from msgspec import structs

from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation
from minisgl.utils.excerpts import excerpt

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
_RESULT = "<tool_response>\n{content}\n</tool_response>"
HERMES_TEXTS = (_TOOLS, _CALL, _RESULT)
_USERS = ("tool", "user")  # roles whose messages become turns of the user


def call_format_of(template: str) -> str | None:
    """The name of the format in which a chat template has calls, if calls in it can be parsed."""
    if "<tool_call>" in template:
        others = ("<function=", "<arg_key>")  # other formats with this marker
        return None if any(other in template for other in others) else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or re.search(r'name\\?": function name, \\?"param', template):
        return "llama3_json"
    return None


def describe_tools(conversation: Conversation, *, has_system: bool) -> Conversation:
    """A conversation for a template that knows no tools.

    Args:
        has_system: whether the template takes a system's turn. Otherwise the tools are described
            in the user's first.

    Raises:
        InvalidRequest: a tool is no JSON object, or a turn with calls or results is malformed.
    """
    messages = _as_text(conversation.messages)
    if conversation.tools:
        instructions = _TOOLS.format(tools="\n".join(map(_describe, conversation.tools)))
        put = _put_into_system_turn if has_system else _put_into_first_question
        messages = put(instructions, messages)
    return structs.replace(conversation, messages=messages, tools=[])


def _put_into_system_turn(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}
    return [first, *messages[1:]]


def _put_into_first_question(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            question = {**message, "content": f"{text}\n\n{_text(message)}"}
            return [*messages[:index], question, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _as_text(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Calls as text of the assistant's turn, and results as turns of the user.

    Results and the questions beside them are one turn: some templates refuse two in a row.
    """
    turns: list[ChatMessage] = []
    for is_users, group in groupby(messages, lambda message: message.get("role") in _USERS):
        spoken = list(group)
        if is_users and any(message["role"] == "tool" for message in spoken):
            turns.append({"role": "user", "content": _join_results(spoken)})
        else:
            turns += map(_with_calls_as_text, spoken)
    return turns


def _join_results(messages: Iterable[ChatMessage]) -> str:
    """Results line by line, and a blank line between them and questions."""
    paragraphs: list[str] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        texts = list(map(_text, group))
        if role == "tool":
            texts = [_RESULT.format(content=text) for text in texts]
        paragraphs.append("\n".join(texts))
    return "\n\n".join(paragraphs)


def _with_calls_as_text(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise _refusal("tool_calls must be a list", calls)
    text = _text(message)
    texts = [text] if text else []
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**turn, "content": "\n".join([*texts, *map(_call, calls)])}


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
        raise _refusal("a tool call must be an object with name and arguments", call)
    arguments = function["arguments"]
    try:
        if not isinstance(arguments, str):  # a text is as the model wrote it
            arguments = _dump(arguments)
        return _CALL.format(name=_dump(function["name"]), arguments=arguments)
    except (TypeError, ValueError):
        raise _refusal("name and arguments of a tool call must be JSON", call) from None


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts: list[str] = []
    for part in parts:
        text = part.get("text", "") if isinstance(part, dict) else None
        if not isinstance(text, str):
            reason = "content beside tools must be a text, or a list of objects with one"
            raise _refusal(reason, content)
        texts.append(text)
    return "".join(texts)


def _describe(tool: Any) -> str:
    if isinstance(tool, dict):
        with suppress(TypeError, ValueError):
            return _dump(tool)
    raise InvalidRequest(f"a tool must be a JSON object, got {excerpt(tool)}", param="tools")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refusal(reason: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{reason}, got {excerpt(value)}", param="messages")
