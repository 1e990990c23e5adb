"""An engine whose experts have tuned tiles meets all of them in its warm-up.

No GPU is needed: which variant of a kernel a call launches is known without one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.checkpoint import ModelConfig
from minisgl.core import SamplingParams
from minisgl.engine import model_runner
from minisgl.engine.warm_up import run_warm_up
from minisgl.kernel import ExpertTiles, ProductTile, gpu
from minisgl.moe import ExpertShape, FusedMoeBackend, TiledSteps, TileTable, fused
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, random_prompts
from tests.engine.test_warm_up import in_the_interpreter, make_logits_numbers
from tests.kernel.launches import Launches


def tiled_steps(num_tokens: int, rows: int) -> TiledSteps:
    tile = ProductTile(rows, 128, 4, 3, 132)
    return TiledSteps(num_tokens, ExpertTiles(16, tile, tile))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/test_gpu_engine.py does it")
def test_all_tuned_tiles_are_met_in_the_warm_up(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_moe")
    model = ModelConfig.from_folder(folder)
    shape = ExpertShape(
        model.num_experts, model.experts_per_token, model.width, model.expert_width, "float32"
    )
    table = TileTable(2, (tiled_steps(3, 32), tiled_steps(6, 64), tiled_steps(9, 128)))

    def create_moe_backend(*asked: object) -> FusedMoeBackend:
        assert asked == (torch.device("cpu"), torch.float32, shape)
        return FusedMoeBackend(table)

    monkeypatch.setattr(model_runner, "create_moe_backend", create_moe_backend)
    in_the_interpreter(monkeypatch)
    monkeypatch.setattr(fused, "triton_kernels_for", lambda x: gpu)
    sizes = {"max_seq_len": 12, "max_prefill_length": 10, "max_running_requests": 5}
    config = config_of(folder, cuda_graph_max_bs=0, **sizes)
    engine = WatchedEngine(config)
    make_logits_numbers(engine, monkeypatch)
    launches = Launches(monkeypatch, {"_look_up", "_scatter", "_best_of_split", "_best_of_all"})
    run_warm_up(engine, config, engine._loaded)
    known = launches.take()["_multiply"]
    assert len(known) == 2 * len(table.steps)

    host = Host(engine, config)
    served: set[str] = set()
    for length in range(1, 11):
        params = [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)]
        host.ask(random_prompts([length], VOCAB_SIZE, seed=length), params)
        served |= launches.take().get("_multiply", set())
    assert served == known
