"""What is known of the model by the time it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.checkpoint import ModelConfig
from minisgl.server import ServerConfig
from minisgl.server.args import REASONING_PARSERS, TOOL_CALL_PARSERS
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.server.parsing.tool_formats import TOOL_FORMATS, Hermes, Mistral
from minisgl.server.serve import served_model
from minisgl.utils.supervisor import StartupReport, TokenizerInfo

RANKS = [StartupReport(max_seq_len=9), StartupReport(max_seq_len=8)]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig.from_folder(checkpoint("llama"))


def test_the_names_that_are_offered_are_those_that_there_are() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS


def test_a_prompt_may_be_as_long_as_its_ranks_can_hold(model: ModelConfig) -> None:
    served = served_model(
        "m", model, [StartupReport(tokenizer=TokenizerInfo(None, {})), *RANKS], ServerConfig()
    )
    assert (served.name, served.max_seq_len, served.width) == ("m", 8, model.width)


def test_how_the_model_calls_and_thinks_is_what_its_tokenizer_says_and_then_the_options(
    model: ModelConfig,
) -> None:
    def dialect(template: str | None, markers: dict[str, int], **options: str) -> Dialect:
        reports = [
            *RANKS,
            StartupReport(tokenizer=TokenizerInfo(template, markers)),
            StartupReport(),
        ]
        return served_model("m", model, reports, ServerConfig(**options)).dialect

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
