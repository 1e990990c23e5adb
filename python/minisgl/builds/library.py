"""A library and its file.

A library is code. So it is kept in a folder, and loaded from a file, that no other user can write.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from minisgl.builds.compilers import run_compilers
from minisgl.errors import ConfigError
from minisgl.utils.env import cache_folder
from minisgl.utils.ownership import is_own_file, make_own_folder

logger = logging.getLogger(__name__)

_MADE = "made.so"
_SCRATCH = "scratch-"
_OLD_S = 3600.0  # no compiler runs so long


def library_folder() -> Path:
    """Make the folder in which libraries are kept.

    Raises:
        OSError: it cannot be made, or other users can write there.
    """
    try:
        return make_own_folder(cache_folder() / "kernels")
    except ConfigError as error:  # who only keeps kernels there can do without
        raise OSError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Library:
    """A library, and the calls of a compiler that make it.

    Libraries of equal names are equal: a name has a digest of all that the library is made of.

    Attributes:
        name: of its file, without the suffix.
        compiler: a program; None if there is none here, and then only a kept library can be used.
        compilations: the compiler's arguments, for calls that run in parallel in one folder.
        linking: its arguments for the last call, which links the results in that folder.
    """

    name: str
    compiler: str | None
    compilations: Sequence[Sequence[str]]
    linking: Sequence[str]

    def path_in(self, folder: Path) -> Path:
        return folder / f"{self.name}.so"

    def is_in(self, folder: Path) -> bool:
        return is_own_file(self.path_in(folder))

    def make_in(self, folder: Path) -> Path:
        """Compile it if the folder does not have it; wait if another process or thread does.

        Raises:
            RuntimeError: a compiler fails; the message is its output.
            OSError: the folder cannot be written.
        """
        library = self.path_in(folder)
        with _lock(folder / f"{self.name}.lock"):
            if not self.is_in(folder):
                _remove_old_scratch(folder)
                self._compile(library)
        return library

    def _compile(self, library: Path) -> None:
        """Compile in a scratch folder, then rename: another process may be loading the old file.

        A file or a link that is not our own is replaced, too.
        """
        assert self.compiler
        started = time.monotonic()
        compilations = [[self.compiler, *arguments] for arguments in self.compilations]
        link = [self.compiler, *self.linking, "-o", _MADE]
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch:
            run_compilers([compilations, [link]], Path(scratch))
            made = Path(scratch) / _MADE
            made.chmod(0o700)
            made.rename(library)
        logger.debug("%s is compiled: %.2f s", self.name, time.monotonic() - started)


def _remove_old_scratch(folder: Path) -> None:
    """Remove the files that killed processes have left while they compiled.

    New files stay: another host may be compiling there, and its locks may not hold here.
    """
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > _OLD_S:
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let in one process and thread at a time. A process that ends, however it does, releases it.

    A file system may have no locks. Then each process compiles for itself.
    """
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest_of(sources: Iterable[Path], others: Iterable[str]) -> str:
    """A digest of sources, of other texts and of TVM FFI's headers, to identify a build."""
    version = importlib.metadata.version("apache-tvm-ffi")
    text = "\n".join([*(file.read_text() for file in sources), *others, version])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ffi_folder() -> Path:
    """The folder of TVM FFI. It is not imported, because it imports torch.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    locations = (spec and spec.submodule_search_locations) or ()
    for location in locations:
        return Path(location)
    raise ModuleNotFoundError("tvm_ffi is not installed")


def ffi_include_options() -> list[str]:
    """A compiler's options for TVM FFI's headers, with DLPack's."""
    return [f"-I{ffi_folder() / 'include'}"]


def ffi_link_options() -> list[str]:
    """A linker's options for TVM FFI."""
    return [f"-L{ffi_folder() / 'lib'}", "-ltvm_ffi"]
