"""What is known of the model by the time it is served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.server import ServerConfig
from minisgl.server.api_process import served_model
from minisgl.server.args import REASONING_PARSERS, TOOL_CALL_PARSERS
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.server.parsing.tool_formats import TOOL_FORMATS, Hermes, Mistral
from minisgl.server.requests.tools import Function, ToolUse
from minisgl.server.serve import handlers_restored
from minisgl.worker_info import SchedulerInfo, TokenizerInfo

RANKS = [SchedulerInfo(9, "cpu"), SchedulerInfo(8, "cpu")]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig.from_folder(checkpoint("llama"))


def test_the_names_that_are_offered_are_those_that_there_are() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS


def test_a_prompt_may_be_as_long_as_its_ranks_can_hold(model: ModelConfig) -> None:
    served = served_model("m", model, [TokenizerInfo(None, {}), *RANKS], ServerConfig())
    assert (served.name, served.max_seq_len, served.width) == ("m", 8, model.width)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 500), ("temperature", "hot"), ("top_k", 20.5), ("top_p", 0), ("min_p", [0.1])],
)
def test_a_recommendation_that_no_request_could_follow_is_refused(
    model: ModelConfig, field: str, value: Any
) -> None:
    """The server would refuse each request that leaves the field out."""
    bad = replace(model, sampling_defaults={field: value})
    with pytest.raises(ConfigError, match=f"generation_config.json of m: {field} must be .*, got"):
        dialect_of(bad, TokenizerInfo(None, {}))


def dialect_of(model: ModelConfig, tokenizer: TokenizerInfo, **options: Any) -> Dialect:
    return served_model("m", model, [*RANKS, tokenizer], ServerConfig(**options)).dialect


def test_tools_that_the_template_does_not_show_are_described_and_called_as_hermes_has_it(
    model: ModelConfig,
) -> None:
    described = TokenizerInfo("{{ messages }}", {}, describes_tools=True, call_format="hermes")
    assert type(dialect_of(model, described).tool_format) is Hermes
    assert type(dialect_of(model, described, tool_call_parser="hermes").tool_format) is Hermes
    with pytest.raises(ConfigError, match="--tool-call-parser must be hermes, got mistral"):
        dialect_of(model, described, tool_call_parser="mistral")


def test_schemas_of_tools_are_closed_unless_the_option_opens_them(model: ModelConfig) -> None:
    tokenizer = TokenizerInfo("<tool_call>", {}, call_format="hermes")
    function = Function(name="f", parameters={"properties": {"a": {}}})
    use = ToolUse([function], "required")
    for is_open in (False, True):
        chosen = dialect_of(model, tokenizer, open_tool_schemas=is_open)
        grammar = chosen.constrain(SamplingParams(), use, allows_reasoning=False).grammar
        assert grammar
        assert ('"additionalProperties": false' in grammar.text) != is_open


def test_how_the_model_calls_and_thinks_is_what_its_tokenizer_says_and_then_the_options(
    model: ModelConfig,
) -> None:
    def dialect(template: str | None, markers: dict[str, int], **options: str) -> Dialect:
        return dialect_of(
            model,
            TokenizerInfo(template, markers, call_format=template and "hermes"),
            **options,
        )

    chosen = dialect("<tool_call>", {"<tool_call>": 7})
    assert (type(chosen.tool_format), chosen.reasoning_format, chosen.added_tokens) == (
        Hermes,
        None,
        {"<tool_call>": 7},
    )
    chosen = dialect("<tool_call>", {}, tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    assert (type(chosen.tool_format), chosen.reasoning_format) == (
        Mistral,
        ReasoningFormat(is_open=True),
    )
    assert dialect(None, {}) == Dialect()


@pytest.mark.parametrize(
    ("template", "parser", "always_reasons"),
    [
        ("<think>", "deepseek_r1", True),
        ("<think> {{ enable_thinking }}", "deepseek_r1", False),
        ("<think>", "qwen3", False),  # the model begins it, and a grammar may keep it from that
        ("<think>", None, False),
    ],
)
def test_a_model_always_reasons_if_its_template_begins_that_and_has_no_switch(
    model: ModelConfig, template: str, parser: Any, always_reasons: bool
) -> None:
    workers = [TokenizerInfo(template, {}), *RANKS]
    served = served_model("m", model, workers, ServerConfig(reasoning_parser=parser))
    assert served.always_reasons == always_reasons


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_event_loop_a_signal_does_what_it_did_before(number: int) -> None:
    """asyncio would leave the system's handler: SIGTERM kills, and a folder stays."""

    async def handle() -> None:
        asyncio.get_running_loop().add_signal_handler(number, print)

    def handler(*_: object) -> None:
        pass

    previous = signal.signal(number, handler)
    try:
        with handlers_restored():
            asyncio.run(handle())
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, previous)
