"""The arguments of `LLM`: options, one prompt or several, one set of parameters or several."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import torch

from minisgl.config import SchedulerConfig
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, InvalidRequest, RequestError
from minisgl.message import ChatMessage
from minisgl.utils.excerpts import excerpt

Prompt: TypeAlias = str | Sequence[int]
_ROLES = ("system", "developer", "user", "assistant", "tool")  # those of the server
_MAX_DEPTH = 64  # of lists and dicts in a message or a tool, as for the server


def check_options(names: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: there is no such option; the closest is named, if one is close.
    """
    known = [field.name for field in fields(SchedulerConfig) if field.name != "model"]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"LLM has no option {name}{hint}")


@contextmanager
def prompt_is_named(index: int, num_prompts: int) -> Iterator[None]:
    """Let errors of a prompt have a note which of several it is."""
    try:
        yield
    except RequestError as error:
        if num_prompts > 1:
            error.add_note(f"of prompt {index}, from 0")
        raise


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one.

    An array or a tensor of one dimension is a prompt; of one with two dimensions each row is.

    Raises:
        InvalidRequest: it is neither a prompt nor a sequence of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    given: Any = prompts
    num_dimensions = given.ndim if isinstance(given, np.ndarray | torch.Tensor) else 0
    is_sequence = isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)
    if num_dimensions == 0 and not is_sequence:
        raise InvalidRequest(
            f"prompts must be a text, token ids, or a sequence of such, got {excerpt(given)}"
        )
    if len(given) and (num_dimensions == 1 or isinstance(given[0], int | np.integer)):
        return [given]
    return list(given)


def as_conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[list[ChatMessage]]:
    """One conversation becomes a list of one, and each message what chat templates expect.

    Raises:
        InvalidRequest: they are no lists of messages, a role or a content is not supported, or
            calls have a value that is no JSON.
    """
    listed: Any = messages if isinstance(messages, list | tuple) else [None]
    conversations: Sequence[Any] = listed
    if listed and isinstance(listed[0], dict):
        conversations = [listed]
    for conversation in conversations:
        is_list = isinstance(conversation, list | tuple)
        if not is_list or not all(isinstance(message, dict) for message in conversation):
            raise InvalidRequest(
                "messages must be a list of dicts with role and content, or a list of such lists, "
                f"got {excerpt(messages)}",
                param="messages",
            )
    read: list[list[ChatMessage]] = []
    for index, conversation in enumerate(conversations):
        with prompt_is_named(index, len(conversations)):
            read.append(list(map(_for_template, conversation)))
    return read


def _for_template(message: ChatMessage) -> ChatMessage:
    """A message as the server has it: text parts are joined, and a developer is the system."""
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"role must be one of {', '.join(_ROLES)}, got {excerpt(role)}", param="messages"
        )
    read = {**message, "role": "system" if role == "developer" else role}
    if message.get("content") is not None:
        read["content"] = _text_of(message["content"])
    _check_json(read.get("tool_calls"), "tool_calls", param="messages")
    return read


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(map(_is_text_part, content)):
        raise InvalidRequest(
            f"content must be a text or a list of text parts, got {excerpt(content)}",
            param="messages",
        )
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def as_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools as a list; none for None.

    Raises:
        InvalidRequest: they are no sequence of dicts, or a value in one is no JSON.
    """
    listed: Any = () if tools is None else tools
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str | bytes)
    if not is_list or not all(isinstance(each, dict) for each in listed):
        raise InvalidRequest(
            f"tools must be a sequence of dicts, got {excerpt(tools)}", param="tools"
        )
    for index, tool in enumerate(listed):
        _check_json(tool, _name_of_tool(tool, index), param="tools")
    return list(listed)


def _name_of_tool(tool: dict[str, Any], index: int) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return f"the tool {excerpt(name)}" if isinstance(name, str) else f"tool {index}"


def _check_json(value: Any, owner: str, *, param: str) -> None:
    """
    Args:
        owner: what the value is, for the error.

    Raises:
        InvalidRequest: it has a value that JSON has not, which is named with its place, or lists
            and dicts are nested too deeply in it.
    """
    unread: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while unread:
        place, part = unread.pop()
        if len(place) > _MAX_DEPTH:
            raise InvalidRequest(
                f"{owner} is nested more than {_MAX_DEPTH} deep, at {'.'.join(place[:8])}...",
                param=param,
            )
        if isinstance(part, dict) and all(map(_is_text, part)):
            unread += [((*place, name), below) for name, below in part.items()]
        elif isinstance(part, list | tuple):
            unread += [((*place, str(index)), below) for index, below in enumerate(part)]
        elif not _is_json(part):
            raise InvalidRequest(
                f"{owner} must be JSON, without halves of surrogate pairs, got {excerpt(part)}"
                + (f" at {'.'.join(place)}" if place else ""),
                param=param,
            )


def _is_text(name: Any) -> bool:
    return isinstance(name, str) and _is_json(name)


def _is_json(value: Any) -> bool:
    """Whether JSON in UTF-8 has such a value."""
    if isinstance(value, dict):  # one whose names are not all texts
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return False
    return True


def list_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """The parameters of each prompt.

    Raises:
        InvalidRequest: they are no parameters, or there are more or fewer than prompts.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params_list: Sequence[Any] = params if isinstance(params, list | tuple) else [params]
    for each in params_list:
        if not isinstance(each, SamplingParams):
            raise InvalidRequest(
                "sampling_params must be SamplingParams, one or a list of them, "
                f"got {excerpt(each)}"
            )
    if len(params_list) != num_prompts:
        raise InvalidRequest(f"{num_prompts} prompts came with {len(params_list)} sampling_params")
    return params_list
