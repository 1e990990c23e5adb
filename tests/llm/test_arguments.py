"""What callers of `LLM` give and is refused: errors are short, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from minisgl import config, sampling_params
from minisgl.errors import InvalidRequest
from minisgl.llm import arguments
from minisgl.llm.arguments import as_conversations, as_list, as_tools, list_params
from minisgl.server.openai.messages import Message
from minisgl.server.requests.validation import MAX_DEPTH

LONG = ["x" * 10**5] * 10**3


@pytest.mark.parametrize(
    "refused",
    [
        lambda: as_list({LONG[0]}),  # type: ignore[arg-type]
        lambda: as_conversations(LONG[0]),  # type: ignore[arg-type]
        lambda: as_conversations([{"role": LONG}]),
        lambda: as_conversations([{"role": "user", "content": LONG}]),
        lambda: as_tools(LONG),  # type: ignore[arg-type]
        lambda: as_tools([{"function": {"name": LONG[0]}, "x": {1}}]),
        lambda: as_tools([{"x": LONG[0] + "\ud800"}]),
        lambda: list_params(LONG, 1),  # type: ignore[arg-type]
    ],
    ids=["prompt", "messages", "role", "content", "tools", "tool", "half", "parameters"],
)
def test_a_long_value_is_cut_where_it_is_refused(refused: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"xxx\.\.\.xxx|xxx\.\.\.x") as refusal:
        refused()
    assert len(str(refusal.value)) < 1000


def test_bounds_are_those_of_the_server() -> None:
    """Offline use imports nothing of the server, so they stand in both."""
    roles = get_args(Message.model_fields["role"].annotation)
    assert sorted(arguments._ROLES) == sorted(roles)
    assert arguments._MAX_DEPTH == MAX_DEPTH
    assert sampling_params.MAX_COUNT == config.MAX_COUNT
