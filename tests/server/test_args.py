"""The command line: every field is a flag, and every bad value is refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ConfigError
from minisgl.server import ServerConfig, parse_args
from minisgl.version import __version__

FEATURES = Path(__file__).parents[2] / "docs" / "features.md"
OPERATING = FEATURES.with_name("operating.md")
GIVEN: dict[str, tuple[list[str], Any]] = {
    "model": (["--model", "some/model"], "some/model"),
    "model_source": (["--model-source", "modelscope"], "modelscope"),
    "device": (["--device", "cpu"], "cpu"),
    "dtype": (["--dtype", "float32"], "float32"),
    "tp": (["--tp", "2"], 2),
    "ep": (["--tp", "2", "--ep"], True),
    "attn": (["--attn", "torch"], "torch"),
    "comm": (["--comm", "peer"], "peer"),
    "page_size": (["--page-size", "4"], 4),
    "num_pages": (["--num-pages", "100"], 100),
    "memory_ratio": (["--memory-ratio", "0.25"], 0.25),
    "max_seq_len": (["--max-seq-len", "64"], 64),
    "max_running_requests": (["--max-running-requests", "3"], 3),
    "cuda_graph_max_bs": (["--cuda-graph-max-bs", "0"], 0),
    "dummy_weight": (["--dummy-weight"], True),
    "pack_weights": (["--no-pack-weights"], False),
    "cache": (["--cache", "naive"], "naive"),
    "max_prefill_length": (["--max-prefill-length", "128"], 128),
    "schedule": (["--schedule", "fcfs"], "fcfs"),
    "target_itl_ms": (["--target-itl-ms", "50"], 50.0),
    "overlap": (["--overlap"], True),
    "seed": (["--seed", "-1"], -1),
    "allow_control_tokens": (["--allow-control-tokens"], True),
    "host": (["--host", "::1"], "::1"),
    "port": (["--port", "0"], 0),
    "shell": (["--shell"], True),
    "served_model_name": (["--served-model-name", "m"], "m"),
    "api_workers": (["--api-workers", "3"], 3),
    "num_tokenizer": (["--num-tokenizer", "0"], 0),
    "api_key": (["--api-key", "a, b", "--api-key", "c"], ("a", "b", "c")),
    "strict_fields": (["--strict-fields"], True),
    "key_limits": (["--key-limits", "keys.toml"], "keys.toml"),
    "share_prefixes_between_keys": (["--share-prefixes-between-keys"], True),
    "tool_call_parser": (["--tool-call-parser", "mistral"], "mistral"),
    "open_tool_schemas": (["--open-tool-schemas"], True),
    "reasoning_parser": (["--reasoning-parser", "qwen3"], "qwen3"),
    "cors_origins": (
        ["--cors-origins", "https://a.org,http://b:80"],
        ("https://a.org", "http://b:80"),
    ),
    "max_open_requests": (["--max-open-requests", "1"], 1),
    "max_connections": (["--max-connections", "7"], 7),
    "header_timeout_s": (["--header-timeout-s", "3"], 3),
    "body_timeout_s": (["--body-timeout-s", "4"], 4),
    "keep_alive_timeout_s": (["--keep-alive-timeout-s", "5"], 5),
    "request_timeout_s": (["--request-timeout-s", "60"], 60),
    "max_body_mb": (["--max-body-mb", "1"], 1),
    "start_timeout_s": (["--start-timeout-s", "5"], 5),
    "step_timeout_s": (["--step-timeout-s", "9"], 9),
    "keep_standbys": (["--no-keep-standbys"], False),
    "drain_timeout_s": (["--drain-timeout-s", "0"], 0),
    "otlp_endpoint": (["--otlp-endpoint", "http://localhost:4318"], "http://localhost:4318"),
    "log_level": (["--log-level", "DEBUG"], "DEBUG"),
    "log_json": (["--log-json"], True),
}
# What a field needs of the others.
NEEDED = {"ep": {"tp": 2}}
FIELDS = [field.name for field in dataclasses.fields(ServerConfig)]


@pytest.fixture(autouse=True)
def no_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_API_KEY", raising=False)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag_that_sets_it_and_nothing_else(name: str) -> None:
    argv, value = GIVEN[name]
    assert parse_args(argv) == ServerConfig(**{**NEEDED.get(name, {}), name: value})
    assert type(getattr(parse_args(argv), name)) is type(value)


def test_a_flag_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--max-running", "3"])
    assert "--max-running" in capsys.readouterr().err


def test_without_flags_everything_is_at_its_default() -> None:
    assert parse_args([]) == ServerConfig()
    assert (ServerConfig().host, ServerConfig().port) == ("127.0.0.1", 8000)


AUTO_BY_DEFAULT = [
    field.name for field in dataclasses.fields(ServerConfig) if field.default is None
]


@pytest.mark.parametrize("name", AUTO_BY_DEFAULT)
def test_an_option_that_is_auto_may_be_given_as_that_word(name: str) -> None:
    assert ServerConfig(**{name: "auto"}) == ServerConfig()
    if not isinstance(GIVEN[name][1], bool):
        assert parse_args([flag(name), "auto"]) == ServerConfig()


@pytest.mark.parametrize("name", ["cache", "tp", "step_timeout_s"])
def test_other_options_are_not_auto(name: str) -> None:
    with pytest.raises(ConfigError, match=flag(name)):
        ServerConfig(**{name: "auto"})
    with pytest.raises(SystemExit):
        parse_args([flag(name), "auto"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dtype", "int8"], "choose from '?auto'?, '?bfloat16"),  # by the version of Python
        (["--page-size", "x"], "invalid int value: 'x'"),
        (["--memory-ratio", "x"], "invalid float value: 'x'"),
    ],
)
def test_what_is_no_value_is_refused_with_what_would_be_one(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["overlap", "pack_weights", "shell"])
def test_a_flag_that_is_on_or_off_has_both_forms(name: str) -> None:
    assert getattr(parse_args([flag(name)]), name) is True
    assert getattr(parse_args(["--no-" + name.replace("_", "-")]), name) is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp", "0"),
        ("tp", "-1"),
        ("page_size", "0"),
        ("num_pages", "0"),
        ("max_seq_len", "-5"),
        ("max_running_requests", "0"),
        ("memory_ratio", "0"),
        ("memory_ratio", "1.5"),
        ("memory_ratio", "nan"),
        ("max_prefill_length", "0"),
        ("port", "-1"),
        ("port", "65536"),
        ("otlp_endpoint", "localhost:4318"),
        ("num_tokenizer", "-1"),
        ("max_open_requests", "0"),
        ("max_connections", "0"),
        ("header_timeout_s", "0"),
        ("body_timeout_s", "-1"),
        ("keep_alive_timeout_s", "0"),
        ("max_body_mb", "0"),
        ("start_timeout_s", "0"),
        ("start_timeout_s", "2000001"),
        ("request_timeout_s", "100000000000000000000"),
        ("drain_timeout_s", "-1"),
        ("max_body_mb", "1048577"),
        ("max_open_requests", "2147483648"),
        ("page_size", "65537"),
        ("num_pages", "2147483648"),
        ("max_prefill_length", "2147483648"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_flag_and_the_value(
    name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{flag(name)} .*got {re.escape(value)}"):
        parse_args([f"{flag(name)}={value}"])


def test_an_empty_host_is_refused_because_it_would_be_every_address() -> None:
    with pytest.raises(ConfigError, match=r"--host is empty; .* 0\.0\.0\.0"):
        parse_args(["--host", ""])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--dtype", "float8"], "--dtype"),
        (["--cache", "lru"], "--cache"),
        (["--device", "tpu"], "--device"),
        (["--log-level", "LOUD"], "--log-level"),
        (["--tool-call-parser", "xml"], "--tool-call-parser"),
        (["--reasoning-parser", "yes"], "--reasoning-parser"),
        (["--model-source", "disk"], "--model-source"),
        (["--port", "http"], "--port"),
        (["--tp", "1.5"], "--tp"),
        (["--tp"], "--tp"),
        (["--unheard-of"], "--unheard-of"),
        (["positional"], "positional"),
    ],
)
def test_what_cannot_be_parsed_ends_the_program_with_usage(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(argv)
    assert end.value.code == 2
    assert "| exit code 2 |" in OPERATING.read_text()
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_help_shows_every_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(["--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServerConfig):
        assert flag(field.name) in shown
        assert field.metadata["help"] in shown


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(["--version"])
    assert (end.value.code, capsys.readouterr().out.strip()) == (0, __version__)


def test_the_documentation_lists_every_flag_and_no_other() -> None:
    documented = re.findall(r"^\| `(--[a-z-]+)` \|", FEATURES.read_text(), re.MULTILINE)
    assert documented == [flag(name) for name in FIELDS]


def test_the_documentation_has_every_default() -> None:
    documented = dict(
        re.findall(r"^\| `(--[a-z-]+)` \| (\S+) \|", FEATURES.read_text(), re.MULTILINE)
    )
    words: dict[Any, str] = {None: "auto", (): "none", False: "off", True: "on"}
    defaults = {flag(field.name): field.default for field in dataclasses.fields(ServerConfig)}
    assert documented == {
        name: words[value] if value in (None, ()) or isinstance(value, bool) else str(value)
        for name, value in defaults.items()
    }


def test_the_documentation_has_the_help_of_every_flag_and_its_choices() -> None:
    documented = dict(
        re.findall(r"^\| `(--[a-z-]+)` \| \S+ \| (.+) \|$", FEATURES.read_text(), re.MULTILINE)
    )
    helps: dict[str, str] = {}
    for field in dataclasses.fields(ServerConfig):
        choices = field.metadata["choices"]
        suffix = f" ({', '.join(choices)})" if choices else ""
        helps[flag(field.name)] = field.metadata["help"] + suffix
    plain = {name: text.replace("\\|", "|").replace("`", "") for name, text in documented.items()}
    assert plain == helps


@pytest.mark.parametrize(
    "origin",
    ["", "a.org", "https://a.org/", "https://a.org/page", "https://", "https://*,,", "null"],
)
def test_what_no_browser_would_send_as_its_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins must be"):
        parse_args([f"--cors-origins={origin}"])


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_API_KEY", "b,c")
    assert parse_args(["--api-key", "a"]).api_key == ("a", "b", "c")
    assert parse_args([]).api_key == ("b", "c")


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00"])
def test_a_name_of_the_model_can_be_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"printable and not empty, .*--served-model-name"):
        parse_args([f"--served-model-name={name}"])


@pytest.mark.parametrize("keys", ["", "K1,,K2", "K1,", "K1 K2", "K1\tK2", "K1\nK2"])
@pytest.mark.parametrize("where", ["--api-key", "MINISGL_API_KEY"])
def test_a_server_that_was_to_be_closed_does_not_start_open(
    keys: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "MINISGL_API_KEY":
        monkeypatch.setenv(where, keys)
    with pytest.raises(ConfigError, match=where) as refusal:
        parse_args([f"--api-key={keys}"] if where == "--api-key" else [])
    assert not re.search("K[12]", str(refusal.value)), "it repeats a key"


@pytest.mark.parametrize("flag", ["--api-key", "--cors-origins", "--model"])
def test_two_dashes_are_no_value(flag: str) -> None:
    """argparse drops them, and then a server that was to be closed would be open."""
    with pytest.raises(ConfigError, match=f"{flag} must not be --"):
        parse_args([f"{flag}=--"])


def test_no_key_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_API_KEY", "sk-secret")
    with pytest.raises(SystemExit):
        parse_args(["--api-key", "sk-hidden", "--help"])
    shown = "".join(capsys.readouterr()) + repr(parse_args(["--api-key", "sk-hidden"]))
    assert "sk-" not in shown


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
)
def test_traces_without_their_library_are_refused_by_the_extras_name(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(ConfigError, match=re.escape("'minisgl[otel]'")):
        parse_args(["--otlp-endpoint", "http://localhost:4318"])
