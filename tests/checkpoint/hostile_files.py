"""Damages the files of tiny models at random, and loads each: a program of its own.

    python -m tests.checkpoint.hostile_files KIND FOLDER SCRATCH SEED COUNT [KIND FOLDER ...]

Each kind has a process of its own, forked once all is imported. It has little memory and little
time for each load; beyond them it ends by a signal or an error. A line in the file SCRATCH/outcomes
names each damage before the load, and what the load did behind it. The last line is the process's
exit code. The program is no test: `test_hostile_files.py` starts it and reads those files.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl.checkpoint import ModelConfig
from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.errors import CheckpointError, ConfigError
from minisgl.models import get_model_class, load_weight
from minisgl.tokenizer import Tokenizer
from tests.distributed.groups import Alone

EXTRA_BYTES = 1 << 30  # of address space, beside what the libraries have
SECONDS = 20  # for one load, on a busy machine
HUGE = [0, 1, 0xFF, 2**31 - 1, 2**32 - 1, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [None, -1, 0, 3, 10**12, 2**64, 1e308, float("nan"), True, "", "x" * 5000]
VALUES += ["/etc/passwd", "../model.safetensors", [], {}, [[]], [10**12], {"a": {"a": []}}]
Random = random.Random


def damage_bytes(content: bytes, rng: Random) -> bytes:
    """Change, cut, repeat or insert bytes, more often near the beginning than behind it."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = int(min(rng.paretovariate(0.5), len(data) - 1)) if len(data) > 1 else 0
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
            case 1:
                data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice(HUGE) & 0xFFFFFFFF)
            case 3:
                del data[at : at + rng.choice([1, 8, 1000])]
            case 4:
                data[at:at] = data[at : at + rng.choice([1, 8, 1000])]
            case 5:
                del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def damage_json(content: bytes, rng: Random) -> bytes:
    """Replace or drop some values, or damage the text."""
    if rng.random() < 0.2:
        return damage_bytes(content, rng)
    root = [json.loads(content)]
    for _ in range(rng.choice([1, 1, 3])):
        node: Any = root
        key: Any = 0
        while isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if isinstance(node, dict) and rng.random() < 0.3:
            del node[key]
        else:
            node[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(root[0])
    match rng.randrange(20):
        case 0:
            text = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
        case 1:
            text = text.replace("3", "3" * 10_000, 1)
    return text.encode()


def damage_header(content: bytes, rng: Random) -> bytes:
    """Damage the JSON header of a safetensors file, whose length stays right, or its bytes."""
    if rng.random() < 0.5:
        return damage_bytes(content, rng)
    (size,) = struct.unpack_from("<Q", content)
    header = damage_json(content[8 : 8 + size], rng)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def load_model(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    model = get_model_class(config.architecture)(config, Alone(), 64, torch.float32)
    load_weight(model, folder, torch.float32, torch.device("cpu"), config.quantization)


def load_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokenizer.make_detokenizer()
    assert isinstance(tokenizer.added_tokens, dict)
    assert isinstance(tokenizer.template.text, str | None)


def load_gguf(folder: Path) -> None:
    out = folder.parent / "converted"
    shutil.rmtree(out, ignore_errors=True)
    write_hf_folder(folder / "model.gguf", out)
    load_model(out)


Damage = Callable[[bytes, Random], bytes]
KINDS: dict[str, tuple[str, Damage, Callable[[Path], None]]] = {
    "safetensors": ("model.safetensors", damage_header, load_model),
    "index": ("model.safetensors.index.json", damage_json, load_model),
    "config": ("config.json", damage_json, load_model),
    "generation config": ("generation_config.json", damage_json, load_model),
    "tokenizer": ("tokenizer.json", damage_json, load_tokenizer),
    "tokenizer config": ("tokenizer_config.json", damage_json, load_tokenizer),
    "gguf": ("model.gguf", damage_bytes, load_gguf),
}


def limit_memory() -> None:
    with Path("/proc/self/statm").open() as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def outcome(load: Callable[[Path], None], folder: Path) -> str:
    try:
        load(folder)
    except (CheckpointError, ConfigError):
        return "refused"
    except BaseException:  # panics of Rust are no Exception
        return traceback.format_exc()
    return "loaded"


def damage_and_load(kind: str, folder: str, scratch: Path, seeds: range) -> None:
    name, damage, load = KINDS[kind]
    target = Path(shutil.copytree(folder, scratch / "model"))
    content = (target / name).read_bytes()
    print(json.dumps(["intact", outcome(load, target)]), flush=True)
    limit_memory()
    for number in seeds:
        (target / name).write_bytes(damage(content, Random(number)))
        print(json.dumps([f"seed {number}", "begun"]), flush=True)
        signal.alarm(SECONDS)
        print(json.dumps([f"seed {number}", outcome(load, target)]), flush=True)
        signal.alarm(0)


def main() -> None:
    arguments = iter(sys.argv[1:])
    for kind, folder, scratch, seed, count in zip(*[arguments] * 5, strict=True):
        with Path(scratch, "outcomes").open("w") as outcomes:
            child = os.fork()
            if child == 0:
                os.dup2(outcomes.fileno(), sys.stdout.fileno())
                seeds = range(int(seed), int(seed) + int(count))
                damage_and_load(kind, folder, Path(scratch), seeds)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            outcomes.write(f"{os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    main()
