"""Safetensors: whole and in parts, and every way in which a folder of them can be wrong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError, ConfigError
from minisgl.models import BaseLLMModel, get_model_class, load_weight, open_checkpoint
from minisgl.models.safetensors_files import SafetensorsCheckpoint
from tests.checkpoint.gguf_files import saved_weights, write_gguf
from tests.checkpoints import ARCHITECTURES, IN_GGUF, save_checkpoint, tiny_checkpoint, tiny_model
from tests.distributed.groups import Alone, in_group
from tests.layers.sources import RandomSource
from tests.quantized import SCHEMES, quantize_checkpoint

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def make(folder: Path, comm: DistributedCommunicator | None = None) -> BaseLLMModel:
    config = ModelConfig.from_folder(folder)
    return get_model_class(config.architecture)(config, comm or Alone(), 64, torch.float32)


def load(folder: Path) -> None:
    load_weight(make(folder), folder, torch.float32, CPU)


@pytest.fixture(params=["llama", "mistral"], ids=["one_file", "several_files"])
def folder(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path: Path
) -> Path:
    """A checkpoint of its own, to be damaged."""
    return Path(shutil.copytree(checkpoint(request.param), tmp_path / "model"))


def weights_of(arch: str) -> dict[str, Tensor]:
    weights = dict(tiny_model(arch).state_dict())
    if arch == "qwen2":
        del weights["lm_head.weight"]  # tied
    return weights


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_tensors_and_their_parts_are_those_that_were_saved(
    arch: str, checkpoint: Callable[[str], Path]
) -> None:
    source = open_checkpoint(checkpoint(arch), torch.float32, CPU)
    for name, weight in weights_of(arch).items():
        shape = tuple(weight.shape)
        rows = range(shape[0] // 4, shape[0] // 2)
        assert torch.equal(source.read(name, shape), weight)
        assert torch.equal(source.read(name, shape, rows=rows), weight[rows.start : rows.stop])
        if len(shape) == 2:
            cols = range(3, shape[1] - 5)
            assert torch.equal(
                source.read(name, shape, cols=cols), weight[:, cols.start : cols.stop]
            )
            both = source.read(name, shape, rows=rows, cols=cols)
            assert torch.equal(both, weight[rows.start : rows.stop, cols.start : cols.stop])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    name: str, value: float, folder: Path
) -> None:
    path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    weights = load_file(path)
    for place in (0, -1):
        damaged = weights[name].clone()
        damaged.view(-1)[place] = value
        save_file({**weights, name: damaged}, path)
        with pytest.raises(
            CheckpointError, match=f"^{folder}: '{name}' has NaN or infinity in float32$"
        ):
            load(folder)


def test_a_weight_that_the_dtype_cannot_hold_is_refused_with_the_dtype(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = 1e5
    save_file(weights, folder / "model.safetensors")
    load(folder)
    with pytest.raises(
        CheckpointError,
        match=r"'model\.norm\.weight' has NaN or infinity in float16; see --dtype$",
    ):
        load_weight(make(folder), folder, torch.float16, CPU)


def test_a_part_without_rows_is_empty(checkpoint: Callable[[str], Path]) -> None:
    source = open_checkpoint(checkpoint("llama"), torch.float32, CPU)
    assert source.read("lm_head.weight", (301, 64), rows=range(301, 301)).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_has_the_dtype_asked_for_and_memory_of_its_own(
    dtype: torch.dtype, checkpoint: Callable[[str], Path]
) -> None:
    source = open_checkpoint(checkpoint("llama"), dtype, CPU)
    one, other = (source.read("lm_head.weight", (301, 64)) for _ in range(2))
    assert one.dtype == dtype
    assert one.is_contiguous()
    one.zero_()
    assert torch.equal(other, weights_of("llama")["lm_head.weight"].to(dtype))


def test_membership_tells_what_there_is(checkpoint: Callable[[str], Path]) -> None:
    source = SafetensorsCheckpoint(checkpoint("qwen2"), torch.float32, CPU)
    assert "model.norm.weight" in source
    assert "lm_head.weight" not in source


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "biased llama"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_reads_its_shard_of_a_weight_and_no_more(
    arch: str, tp: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    if arch == "biased llama":
        folder = tiny_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    else:
        folder = checkpoint(arch)
    source = RandomSource()
    for rank in range(tp):
        make(folder, Alone(rank, tp)).load(source)
    for name, reads in source.reads.items():
        owner = name.split(".")[-2]
        is_full_width = arch.startswith("olmo") and owner in ("q_norm", "k_norm")
        everywhere = owner == "gate" or ("norm" in owner and not is_full_width)
        is_of_keys = owner in ("k_proj", "v_proj") or (is_full_width and owner == "k_norm")
        replicas = max(1, tp // 2) if is_of_keys else 1  # of two kv heads
        assert (reads == (tp if everywhere else replicas)).all(), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_reads_every_tensor_of_its_checkpoint(
    arch: str, checkpoint: Callable[[str], Path]
) -> None:
    source = RandomSource()
    make(checkpoint(arch)).load(source)
    files = checkpoint(arch).glob("*.safetensors")
    assert source.reads.keys() == {name for file in files for name in load_file(file)}


def test_heads_that_the_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="--tp 3 does not divide the model's 4 attention heads"):
        make(folder, Alone(0, 3))


def test_an_unknown_activation_is_named_with_those_there_are(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_model("llama", hidden_act="relu"), tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_act 'relu' is not .*silu"):
        make(folder)


@pytest.mark.parametrize(
    ("arch", "field"),
    [
        ("mistral", "attention_bias"),
        *((arch, "mlp_bias") for arch in ARCHITECTURES if arch not in ("llama", "smollm3")),
    ],
)
def test_biases_that_an_architecture_lacks_are_refused_by_their_field(
    arch: str, field: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """And not by the first tensor that is missing: no weight is read."""
    config = json.loads((checkpoint(arch) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: True}))
    (name,) = config["architectures"]
    with pytest.raises(
        CheckpointError,
        match=rf"^config\.json: {field} is true, but the layers of {name} have no such biases$",
    ):
        make(tmp_path)


def test_an_activation_that_experts_do_not_have_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", hidden_act="gelu_pytorch_tanh")
    folder = save_checkpoint(model, tmp_path)
    message = r"config\.json: hidden_act 'gelu_pytorch_tanh' is not supported for experts; .*silu"
    with pytest.raises(CheckpointError, match=message):
        make(folder)


def test_an_unknown_rope_type_is_named(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = save_checkpoint(tiny_model("llama", rope_parameters=rope), tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: rope_type 'dynamic' is not supp"):
        make(folder)


def any_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_an_intact_copy_loads(folder: Path) -> None:
    load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = load_file(any_file(folder))
    name = sorted(weights)[-1]
    del weights[name]
    save_file(weights, any_file(folder))
    with pytest.raises(CheckpointError, match=f"has no tensor '{name}'"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    weights = load_file(any_file(folder))
    name = sorted(weights)[-1]
    shape = tuple(weights[name].shape)
    wrong = (shape[0] + 1, *shape[1:])
    weights[name] = torch.zeros(wrong)
    save_file(weights, any_file(folder))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert all(text in str(error.value) for text in (name, str(shape), str(wrong)))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1], ids=lambda keep: f"{keep} kept")
def test_a_truncated_file_is_named(keep: float, folder: Path) -> None:
    content = any_file(folder).read_bytes()
    any_file(folder).write_bytes(content[: int(keep * len(content)) if keep == 0.5 else keep])
    with pytest.raises(CheckpointError, match=any_file(folder).name):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"garbage" * 1000, b"\0" * 5000, b"\xff" * 5000], ids=["text", "zeros", "ones"]
)
def test_a_file_of_something_else_is_named(content: bytes, folder: Path) -> None:
    any_file(folder).write_bytes(content)
    with pytest.raises(CheckpointError, match=any_file(folder).name):
        load(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=f"weights are missing: {folder}"):
        load(folder)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_missing_file_is_named(folder: Path) -> None:
    any_file(folder).unlink()
    with pytest.raises(
        CheckpointError, match=r"weights are missing: .*model-00001-of-00005\.safetensors"
    ):
        load(folder)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": 3}', b"\xff\xff"], ids=repr
)
def test_a_damaged_index_is_named(content: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX} (cannot be read|holds no JSON)"):
        load(folder)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
@pytest.mark.parametrize(
    "name", ["../{}", "/{}", "sub/{}", "..", ".", "", "{}\0", 3, None, ["{}"], "{}/"], ids=repr
)
def test_a_name_in_an_index_does_not_leave_the_folder(
    name: Any, folder: Path, tmp_path: Path
) -> None:
    file = any_file(folder)
    outside = tmp_path / "outside"
    (outside / "inside").mkdir(parents=True)
    inside = folder.rename(outside / "inside" / "sub")
    (outside / "inside" / file.name).write_bytes((inside / file.name).read_bytes())
    index = json.loads((inside / INDEX).read_text())
    last = list(index["weight_map"])[-1]
    index["weight_map"][last] = name.format(file.name) if isinstance(name, str) else name
    (inside / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is no file of its folder|cannot be read"):
        load(inside)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_the_files_of_a_folder_may_be_links_as_in_the_cache_of_a_hub(
    folder: Path, tmp_path: Path
) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in folder.glob("*.safetensors"):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    load(folder)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_files_that_the_index_does_not_name_are_not_read(folder: Path) -> None:
    """Such as the same weights once more, in another form."""
    (folder / "consolidated.safetensors").write_bytes(b"garbage")
    load(folder)


def changed(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, with other numbers."""
    return {name: weight + 1 for name, weight in load_file(file).items()}


@pytest.mark.parametrize("name", ["a.safetensors", "model_old.safetensors", "z.safetensors"])
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_file_beside_the_one_that_holds_all_is_not_read(name: str, folder: Path) -> None:
    save_file(changed(any_file(folder)), folder / name)
    source = open_checkpoint(folder, torch.float32, CPU)
    for tensor, weight in weights_of("llama").items():
        assert torch.equal(source.read(tensor, tuple(weight.shape)), weight)


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_tensor_in_two_files_is_that_of_the_file_which_the_index_names(
    number: int, folder: Path
) -> None:
    others = changed(folder / "model-00003-of-00005.safetensors")
    file = folder / f"model-0000{number}-of-00005.safetensors"
    save_file({**load_file(file), **others}, file)
    source = open_checkpoint(folder, torch.float32, CPU)
    for tensor, weight in weights_of("mistral").items():
        assert torch.equal(source.read(tensor, tuple(weight.shape)), weight)


def in_two_files(folder: Path) -> tuple[Path, Path]:
    """Put a tensor into two files, with other numbers, that no index names."""
    first = folder / "model-00001-of-00005.safetensors"
    last = folder / "model-00005-of-00005.safetensors"
    for number, file in enumerate((first, last)):
        save_file({**load_file(file), "extra": torch.full((3,), float(number))}, file)
    return first, last


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_tensor_in_two_files_without_an_index_is_named_with_both(folder: Path) -> None:
    first, last = in_two_files(folder)
    (folder / INDEX).unlink()
    message = f"'extra' is in two files, {first} and {last.name}"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("indexed", [None, "model-00003-of-00005.safetensors"])
@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_of_two_files_between_which_the_index_does_not_decide_the_first_counts(
    indexed: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, last = in_two_files(folder)
    if indexed:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["extra"] = indexed
        (folder / INDEX).write_text(json.dumps(index))
    source = SafetensorsCheckpoint(folder, torch.float32, CPU)
    assert torch.equal(source.read("extra", (3,)), torch.zeros(3))
    (record,) = caplog.records
    assert f"'extra' is in {first} and {last.name}" in record.getMessage()


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_one_warning_is_for_all_tensors_between_whose_files_the_index_does_not_decide(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in in_two_files(folder):
        save_file({**load_file(file), "more": torch.zeros(3)}, file)
    SafetensorsCheckpoint(folder, torch.float32, CPU)
    (record,) = caplog.records
    assert "as for 1 more tensors" in record.getMessage()


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_files_without_an_index_are_read_together(folder: Path) -> None:
    (folder / INDEX).unlink()
    load(folder)


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_tensor_is_taken_from_the_one_file_that_has_it_whatever_the_index_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = json.loads((folder / INDEX).read_text())
    named = "model-00001-of-00005.safetensors"
    assert index["weight_map"]["model.norm.weight"] != named
    index["weight_map"]["model.norm.weight"] = named
    (folder / INDEX).write_text(json.dumps(index))
    source = open_checkpoint(folder, torch.float32, CPU)
    weight = weights_of("mistral")["model.norm.weight"]
    assert torch.equal(source.read("model.norm.weight", tuple(weight.shape)), weight)
    assert unread(folder) == []
    assert caplog.text == ""


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_tensor_missing_from_the_file_that_the_index_names_is_named(folder: Path) -> None:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    file = folder / index["weight_map"][name]
    weights = load_file(file)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=f"{file} has no tensor '{name}', though .*says so"):
        load(folder)


@pytest.mark.parametrize("content", [None, "garbage"])
@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_an_index_beside_the_file_that_holds_all_is_not_read(
    content: str | None, folder: Path
) -> None:
    """As in transformers: it is left from another saving."""
    files = sorted(folder.glob("*.safetensors"))
    whole = {name: weight for file in files for name, weight in load_file(file).items()}
    save_file(whole, folder / "model.safetensors")
    for file in files[1:]:
        file.unlink()
    save_file(changed(files[0]), files[0])
    if content is not None:
        (folder / INDEX).write_text(content)
    source = open_checkpoint(folder, torch.float32, CPU)
    for tensor, weight in weights_of("mistral").items():
        assert torch.equal(source.read(tensor, tuple(weight.shape)), weight)


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def tied(folder: Path, **weights: Tensor | None) -> None:
    """Let the config of a model in one file say that its head is tied, and change the two."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    stored = {**load_file(any_file(folder)), **weights}
    save_file({name: w for name, w in stored.items() if w is not None}, any_file(folder))


def loaded(folder: Path, comm: DistributedCommunicator) -> tuple[Tensor, Tensor]:
    """The embedding, and the head as the logits show it."""
    model = make(folder, comm)
    load_weight(model, folder, torch.float32, CPU)
    return model.model.embed_tokens.weight_VD, model.logits(torch.eye(64)).T


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_head_that_differs_from_the_embedding_is_not_tied(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tied(folder)
    embedding, head = loaded(folder, Alone())
    assert torch.equal(embedding, weights_of("llama")[EMBEDDING])
    assert torch.equal(head, weights_of("llama")[HEAD])
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in caplog.text


@pytest.mark.parametrize("changed_row", [0, 300], ids=["on_rank_0", "on_rank_1"])
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_ranks_tie_their_heads_together_or_not_at_all(
    changed_row: int, folder: Path, tmp_path: Path
) -> None:
    head = weights_of("llama")[EMBEDDING].clone()
    head[changed_row] += 1
    tied(folder, **{HEAD: head})
    work = partial(is_tied, folder)
    assert in_group(2, tmp_path / "rendezvous", work) == [False, False]


def is_tied(folder: Path, comm: DistributedCommunicator) -> bool:
    model = make(folder, comm)
    load_weight(model, folder, torch.float32, CPU)
    embedding = model.model.embed_tokens.weight_VD
    return model.lm_head._weight._weight_OI is embedding


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (torch.zeros(300, 64), "has the shape"),
        (torch.zeros(301, 64, dtype=torch.int8), "stored as I8"),
        (torch.zeros(301, 64).to(torch.float8_e4m3fn), "stored as F8_E4M3"),
    ],
    ids=["shape", "int8", "fp8"],
)
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_head_that_cannot_be_read_stays_tied(
    head: Tensor, reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tied(folder, **{HEAD: head})
    assert is_tied(folder, Alone())
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("lm_head.weight is not used, the head is tied to the embedding: ")
    assert reason in message


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_all_ranks_stay_tied_if_one_cannot_read_its_head(folder: Path, tmp_path: Path) -> None:
    tied(folder)
    work = partial(is_tied_but_unreadable_on_rank_1, folder)
    assert in_group(2, tmp_path / "rendezvous", work) == [True, True]


def is_tied_but_unreadable_on_rank_1(folder: Path, comm: DistributedCommunicator) -> bool:
    class Source(SafetensorsCheckpoint):
        def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
            if name == HEAD and comm.info.rank == 1:
                raise CheckpointError("damaged")
            return super()._read(name, part)

    model = make(folder, comm)
    model.load(Source(folder, torch.float32, CPU))
    return model.lm_head._weight._weight_OI is model.model.embed_tokens.weight_VD


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_one_weight_of_both_ends_is_held_once_under_whatever_name_it_is_stored(
    stored: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = weights_of("llama")[EMBEDDING]
    embedding = None if stored == "head" else weight.clone()
    head = None if stored == "embedding" else weight.clone()
    tied(folder, **{EMBEDDING: embedding, HEAD: head})
    assert is_tied(folder, Alone())
    assert torch.equal(loaded(folder, Alone())[0], weight)
    assert caplog.text == ""


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_model_without_embedding_and_head_is_refused(folder: Path) -> None:
    tied(folder, **{EMBEDDING: None, HEAD: None})
    with pytest.raises(CheckpointError, match=f"has no tensor '{EMBEDDING}'"):
        load(folder)


def unread(folder: Path, comm: Alone | None = None) -> list[str]:
    quantization = ModelConfig.from_folder(folder).quantization
    return load_weight(make(folder, comm), folder, torch.float32, CPU, quantization)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "comm", [Alone(), Alone(0, 2), Alone(0, 2, ep=True)], ids=["alone", "tp", "ep"]
)
def test_of_a_whole_checkpoint_nothing_is_unread(
    arch: str, comm: Alone, checkpoint: Callable[[str], Path]
) -> None:
    assert unread(checkpoint(arch), comm) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_a_quantized_checkpoint_nothing_is_unread(
    scheme: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, _ = quantize_checkpoint(checkpoint("llama"), SCHEMES[scheme], tmp_path)
    assert unread(folder) == []


@pytest.mark.parametrize("arch", IN_GGUF)
def test_of_a_gguf_file_nothing_is_unread_and_what_is_unknown_is_refused(
    arch: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = saved_weights(checkpoint(arch))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(arch), weights)
    write_hf_folder(path, tmp_path / "whole")
    assert unread(tmp_path / "whole") == []

    weights["model.layers.0.attn_sinks.weight"] = weights["model.norm.weight"]
    path = write_gguf(tmp_path / "more.gguf", tiny_model(arch), weights)
    write_hf_folder(path, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"does not read: blk\.0\.attn_sinks\.weight$"):
        unread(tmp_path / "more")


def test_a_gguf_file_with_some_of_the_biases_is_refused(tmp_path: Path) -> None:
    weights = saved_weights(tiny_checkpoint("llama", tmp_path / "hf", attention_bias=True))
    for layer in range(2):
        del weights[f"model.layers.{layer}.self_attn.o_proj.bias"]
    model = tiny_model("llama", attention_bias=True)
    write_hf_folder(write_gguf(tmp_path / "one.gguf", model, weights), tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.self_attn\.k_proj\.bias, .*, \.\."
    ):
        unread(tmp_path / "out")


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_tensors_for_which_the_config_has_no_place_are_unread(folder: Path) -> None:
    layer = "model.layers.0.self_attn"
    bias = f"{layer}.q_proj.bias"
    needless = {
        f"{layer}.{part}": torch.ones(1) for part in ("rotary_emb.inv_freq", "k_scale", "v_scale")
    }
    save_file({**load_file(any_file(folder)), **needless, bias: torch.ones(64)}, any_file(folder))
    assert unread(folder) == [bias]

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    ignored = [name for name in weights_of("llama") if name.startswith("model.layers.1.")]
    assert unread(folder) == sorted([bias, *ignored])


def test_pickled_weights_are_not_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    torch.save(weights_of("llama"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights are missing"):
        load(tmp_path)
