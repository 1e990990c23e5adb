"""The command line: one flag for each field of the config tree."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from minisgl.config import (
    AUTO,
    MAX_COUNT,
    SchedulerConfig,
    TokenizerOptions,
    check_bounds,
    flag,
    is_auto_by_default,
    option,
)
from minisgl.errors import ConfigError
from minisgl.utils import env
from minisgl.utils.excerpts import excerpt
from minisgl.utils.standard_streams import Parser
from minisgl.version import __version__

TOOL_CALL_PARSERS = ("hermes", "mistral", "llama3_json")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_OTLP_PACKAGES = (
    "opentelemetry",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "opentelemetry.exporter.otlp",
    "opentelemetry.exporter.otlp.proto.http",
)
_MAX_S = 2_000_000  # what waits for descriptors counts milliseconds in 31 bits
_BOUNDS = {
    "api_workers": (1, MAX_COUNT),
    "num_tokenizer": (0, MAX_COUNT),
    "max_open_requests": (1, MAX_COUNT),
    "max_connections": (1, MAX_COUNT),
    "header_timeout_s": (1, _MAX_S),
    "body_timeout_s": (1, _MAX_S),
    "keep_alive_timeout_s": (1, _MAX_S),
    "max_body_mb": (1, 2**20),
    "request_timeout_s": (1, _MAX_S),
    "start_timeout_s": (1, _MAX_S),
    "step_timeout_s": (1, _MAX_S),
    "drain_timeout_s": (0, _MAX_S),
    "port": (0, 65535),
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig(SchedulerConfig):
    """The options of the server, in addition to those of its schedulers."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    shell: bool = option(False, "chat in this terminal, beside the server")
    served_model_name: str | None = option(
        None, "the model's name in the API; auto: what --model says"
    )
    api_workers: int | None = option(
        None, "processes that serve HTTP, behind one port; auto: one for every two cores, up to 8"
    )
    num_tokenizer: int = option(1, "tokenizer processes; with 0 the detokenizer also tokenizes")
    api_key: tuple[str, ...] = option(
        (),
        "keys, one of which a request must bring, with commas or repeated; also in MINISGL_API_KEY",
        secret=True,
    )
    key_limits: str | None = option(
        None, "TOML file with limits of keys, by their SHA-256; SIGHUP reads it again"
    )
    share_prefixes_between_keys: bool = option(
        False,
        "let requests use prefixes that were computed for another key; "
        "a client with any key can then find out what others have sent",
    )
    tool_call_parser: str | None = option(
        None,
        "how the model calls tools; auto: as its chat template says, else as Hermes does",
        TOOL_CALL_PARSERS,
    )
    open_tool_schemas: bool = option(
        False,
        "let calls have arguments that the tool's schema does not list, unless the tool is strict",
    )
    reasoning_parser: str | None = option(
        None,
        "how the model marks its reasoning, to separate it from content; auto: not at all",
        REASONING_PARSERS,
    )
    strict_fields: bool = option(
        False, "refuse a request with a field that is not known, instead of ignoring the field"
    )
    cors_origins: tuple[str, ...] = option(
        (), "origins whose pages may call this server, with commas; * is all"
    )
    max_open_requests: int = option(2048, "requests that may be open at a time; more get a 429")
    max_connections: int | None = option(
        None, "connections that may be open at a time; auto: as many as descriptors allow"
    )
    header_timeout_s: int = option(10, "seconds that the head of a request may take")
    body_timeout_s: int = option(60, "seconds that the body of a request may take")
    keep_alive_timeout_s: int = option(30, "seconds that a connection may be idle between requests")
    request_timeout_s: int | None = option(
        None, "seconds that a request may take until its last token; auto: no limit"
    )
    max_body_mb: int = option(32, "largest request body, in MiB; larger ones get a 413")
    start_timeout_s: int = option(900, "seconds that the workers may take until they are ready")
    step_timeout_s: int = option(
        300, "seconds that a worker may spend on a step or a prompt; then it is killed and replaced"
    )
    keep_standbys: bool | None = option(
        None,
        "keep a process for each rank that takes over when a scheduler fails, seconds sooner than "
        "a new one, for some hundred MB of host memory each; auto: on GPUs",
    )
    drain_timeout_s: int = option(
        30, "seconds that open requests may take after SIGTERM; new ones get a 503 meanwhile"
    )
    otlp_endpoint: str | None = option(
        None,
        "base URL of an OpenTelemetry collector that gets a trace of each request, "
        "over HTTP at its /v1/traces; auto: none",
    )
    log_level: str = option("INFO", "how much to log", _LOG_LEVELS)
    log_json: bool = option(False, "write each line of the log as a JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, _BOUNDS)
        if not self.host:
            raise ConfigError("--host is empty; it must be an address, or 0.0.0.0 for all of them")
        name = self.served_model_name
        if name is not None and not (name and name.isprintable()):
            raise ConfigError(
                "the model's name in the API must be printable and not empty, "
                f"got {excerpt(name)}; see --served-model-name"
            )
        if any(not key.isprintable() or not key or " " in key for key in self.api_key):
            raise ConfigError("a key in --api-key or MINISGL_API_KEY is empty or has a blank in it")
        if self.otlp_endpoint is not None:
            _check_otlp_endpoint(self.otlp_endpoint)
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    "--cors-origins must be * or like https://example.org:8080, "
                    f"got {excerpt(origin)}"
                )

    @property
    def tokenizer_options(self) -> TokenizerOptions:
        """Where no format of calls is named, the prompts choose one that can be parsed."""
        options = super().tokenizer_options
        return replace(options, falls_back_to_hermes=self.tool_call_parser is None)


def _check_otlp_endpoint(endpoint: str) -> None:
    if not re.fullmatch(r"https?://[^/\s]+\S*", endpoint):
        raise ConfigError(f"--otlp-endpoint must be like http://localhost:4318, got {endpoint}")
    if any(importlib.util.find_spec(package) is None for package in _OTLP_PACKAGES):
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'minisgl[otel]'")


def host_and_port(host: str, port: int) -> str:
    """An address as a URL has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="minisgl",
        allow_abbrev=False,
        description="Serve a large language model behind an OpenAI-compatible API, "
        "or chat with it (--shell).",
    )
    parser.add_argument("--version", action="version", version=__version__)
    hints = typing.get_type_hints(ServerConfig)
    for entry in fields(ServerConfig):
        _add_flag(parser, entry, hints[entry.name])
    return parser


def parse_args(argv: Sequence[str] | None = None) -> ServerConfig:
    """
    Raises:
        ConfigError: a value is outside its bounds.
        OutputFailed: of --help, that cannot be written.
        SystemExit: an unknown flag, or --help.
    """
    arguments = sys.argv[1:] if argv is None else argv
    for argument in arguments:  # argparse would drop the value: a server without any key is open
        if argument.startswith("--") and argument.endswith("=--"):
            raise ConfigError(f"{argument.removesuffix('=--')} must not be --")
    given: dict[str, Any] = vars(make_parser().parse_args(arguments))
    env_keys = env.api_keys()
    if env_keys is not None:
        given["api_key"] += _split_at_commas(env_keys)
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    return ServerConfig(**given)


def _add_flag(parser: argparse.ArgumentParser, entry: Field[object], hint: object) -> None:
    value_type = _without_none(hint)
    words: dict[object, object] = {None: AUTO, (): "none"}
    help_text = f"{entry.metadata['help']} (default: {words.get(entry.default, entry.default)})"
    if value_type is tuple:
        parser.add_argument(
            flag(entry.name),
            action="extend",
            type=_split_at_commas,
            default=[],
            help=help_text,
            metavar="A,B",
        )
        return
    if value_type is bool:
        parser.add_argument(
            flag(entry.name),
            action=argparse.BooleanOptionalAction,
            default=entry.default,
            help=help_text,
        )
        return
    choices = entry.metadata["choices"]
    if choices and is_auto_by_default(entry):
        choices = (AUTO, *choices)
    parser.add_argument(
        flag(entry.name),
        type=_or_auto(value_type) if is_auto_by_default(entry) else value_type,
        default=entry.default,
        choices=choices,
        help=help_text,
        metavar=None if choices else value_type.__name__.upper(),
    )


def _or_auto(value_type: type) -> Callable[[str], Any]:
    """Leave the word as it is: the config knows what it means."""

    def convert(text: str) -> Any:
        return text if text == AUTO else value_type(text)

    convert.__name__ = value_type.__name__  # which argparse's error names
    return convert


def _split_at_commas(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(","))


def _without_none(hint: object) -> type:
    """The type of a field that may also be None for "auto"; tuple for a tuple of anything."""
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    hint = typing.get_origin(hint) or hint
    assert isinstance(hint, type)
    return hint
