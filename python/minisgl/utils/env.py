"""Environment variables. No other file reads or writes them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.utils.excerpts import excerpt

_MAX_PATH = 1024  # bytes of a cache folder, in which there are further folders
_NUM_SHOWN = 50  # characters of a longer path in an error
_SPIN_COUNT = "GOMP_SPINCOUNT"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


def cache_folder() -> Path:
    """The folder of models and compiled kernels: MINISGL_CACHE, or minisgl in the user's cache.

    Raises:
        ConfigError: a variable has no valid path, or there is no home folder.
    """
    folder = os.environ.get("MINISGL_CACHE")
    if folder:
        return _folder_of("MINISGL_CACHE", folder)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if user_cache:
        return _folder_of("XDG_CACHE_HOME", user_cache) / "minisgl"
    try:
        return _folder_of("HOME", "~/.cache") / "minisgl"
    except ConfigError as error:
        raise ConfigError(f"{error}; set MINISGL_CACHE to a folder") from None


def _folder_of(variable: str, value: str) -> Path:
    num_bytes = len(os.fsencode(value))
    if num_bytes > _MAX_PATH:
        raise ConfigError(
            f"{variable}: {value[:_NUM_SHOWN]!r}... has {num_bytes} bytes, a folder at most "
            f"{_MAX_PATH}"
        )
    try:
        folder = Path(value).expanduser()
        folder.exists()
    except PermissionError:  # is said of what is done there
        return folder
    except (OSError, RuntimeError) as error:  # a name that is too long, no such user, no home
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{variable}: {value!r} is no path: {reason}") from None
    return folder


def overlap_disabled() -> bool:
    """MINISGL_DISABLE_OVERLAP_SCHEDULING=1, the alias of `--no-overlap`.

    Raises:
        ConfigError: its value is neither yes nor no.
    """
    return _is_on("MINISGL_DISABLE_OVERLAP_SCHEDULING")


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "")
    word = value.lower()
    if word in _YES:
        return True
    if word in ("", *_NO):
        return False
    words = ", ".join([*_YES, *_NO])
    raise ConfigError(f"{variable} must be one of {words}, got {excerpt(value)}")


def api_keys() -> str | None:
    """MINISGL_API_KEY: keys as for `--api-key`, but invisible in the list of processes."""
    return os.environ.get("MINISGL_API_KEY")


def gloo_interface() -> str | None:
    """GLOO_SOCKET_IFNAME: the network interface on which ranks on a CPU listen."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def openai_api_key() -> str | None:
    """OPENAI_API_KEY: the key that the benchmark sends. No flag, since --out records all flags."""
    return os.environ.get("OPENAI_API_KEY")


def num_openmp_threads() -> str | None:
    """OMP_NUM_THREADS: threads to compute with on a CPU."""
    return os.environ.get("OMP_NUM_THREADS")


@contextmanager
def openmp_spins(count: int) -> Iterator[None]:
    """Set GOMP_SPINCOUNT within, unless the user chose how threads wait, by OMP_WAIT_POLICY too.

    Args:
        count: how often threads of GNU's OpenMP look at what they wait for, before they sleep.
    """
    if {"OMP_WAIT_POLICY", _SPIN_COUNT} & os.environ.keys():
        yield
        return
    os.environ[_SPIN_COUNT] = str(count)
    try:
        yield
    finally:
        del os.environ[_SPIN_COUNT]


def keep_nccl_local() -> None:
    """Set NCCL_SOCKET_IFNAME; otherwise NCCL listens on a network interface of its own choice."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def cuda_home() -> Path | None:
    """CUDA_HOME: the folder of a CUDA toolkit."""
    home = os.environ.get("CUDA_HOME")
    return Path(home) if home else None


def nvcc_of_path() -> Path | None:
    """CUDA's compiler in PATH."""
    found = shutil.which("nvcc")
    return Path(found) if found else None


def let_flashinfer_compile(toolkit: Path) -> None:
    """Set CUDA_HOME, and let PATH end with the programs of this Python, of which ninja is one."""
    os.environ["CUDA_HOME"] = str(toolkit)
    programs = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if programs not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, programs])


def silence_transformers() -> None:
    """Set TRANSFORMERS_NO_ADVISORY_WARNINGS; otherwise transformers advises to install torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def env_with_sys_path() -> dict[str, str]:
    """The environment for a Python process that finds modules where this one does."""
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, "PYTHONPATH": folders}


def env_for_forks() -> dict[str, str]:
    """The environment for a Python process that forks itself: numpy should start no threads."""
    return {**env_with_sys_path(), "OPENBLAS_NUM_THREADS": "1"}


def env_with_scratch(folder: Path) -> dict[str, str]:
    """The environment for programs whose temporary files should be removed with a folder."""
    return {**os.environ, "TMPDIR": str(folder)}
