"""A sharded layer gives what it gives on one rank, and its ranks read each weight once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator, DistributedInfo, SingleCommunicator
from minisgl.errors import ConfigError
from minisgl.kernel import silu_and_mul, split_heads
from minisgl.layers import (
    Context,
    LinearGated,
    LinearQKVMerged,
    LinearRowParallel,
    MoELayer,
    ParallelLMHead,
    VocabParallelEmbedding,
    VocabShard,
)
from minisgl.moe import create_moe_backend
from tests.distributed.groups import Alone, in_group
from tests.layers.sources import RandomSource

WIDTH = 12
MLP_WIDTH = 16
TOKENS = 5
X_TD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
Forward = Callable[[DistributedCommunicator, RandomSource], Any]


def gated_mlp(comm: DistributedCommunicator, source: RandomSource) -> Tensor:
    gate_up = LinearGated(WIDTH, MLP_WIDTH, silu_and_mul, comm.info, bias=True)
    down = LinearRowParallel(MLP_WIDTH, WIDTH, comm, bias=True)
    gate_up.load(source, "mlp.gate_up_proj")
    down.load(source, "mlp.down_proj")
    return down.forward(gate_up.forward_gated(X_TD)).add_up()


def experts(
    comm: DistributedCommunicator,
    source: RandomSource,
    *,
    normalize: bool = True,
    num_experts: int = 5,
) -> Tensor:
    layer = MoELayer(WIDTH, MLP_WIDTH, num_experts, 2, comm, normalize=normalize)
    layer.load(source, "mlp")
    nothing: Any = None
    return layer.forward(
        X_TD,
        Context(nothing, nothing, nothing, nothing, create_moe_backend(X_TD.device, X_TD.dtype)),
    ).add_up()


def embedding(comm: DistributedCommunicator, source: RandomSource, *, vocab_size: int) -> Tensor:
    layer = VocabParallelEmbedding(vocab_size, WIDTH, comm)
    layer.load(source, "embed")
    return layer.forward(torch.arange(vocab_size).flip(0))


def head(
    comm: DistributedCommunicator, source: RandomSource, *, vocab_size: int, tied: bool
) -> Tensor:
    embed = VocabParallelEmbedding(vocab_size, WIDTH, comm)
    embed.load(source, "embed")
    layer = ParallelLMHead(vocab_size, WIDTH, comm, embed if tied else None)
    layer.load(source, "head")
    return VocabShard(vocab_size, comm).join(layer.forward(X_TD))


CASES: dict[str, Forward] = {
    "gated MLP": gated_mlp,
    "experts": experts,
    "experts as the router weights them": partial(experts, normalize=False),
    "embedding": partial(embedding, vocab_size=1024),
    "embedding with a remainder": partial(embedding, vocab_size=700),
    "embedding with a rank that has nothing": partial(embedding, vocab_size=5),
    "head": partial(head, vocab_size=1024, tied=False),
    "head with a remainder": partial(head, vocab_size=700, tied=False),
    "head with a rank that has nothing": partial(head, vocab_size=5, tied=False),
    "head tied to the embedding": partial(head, vocab_size=700, tied=True),
}
EVERYWHERE = {"mlp.gate.weight"}  # the router
# Each with whether ranks have whole experts.
SHARDED = [
    *(pytest.param(forward, False, id=name) for name, forward in CASES.items()),
    pytest.param(partial(experts, num_experts=8), True, id="whole experts"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("forward", "ep"), SHARDED)
def test_a_sharded_layer_equals_the_whole_one(
    forward: Forward, ep: bool, size: int, tmp_path: Path
) -> None:
    expected = forward(SingleCommunicator(), RandomSource())
    source = RandomSource()
    outputs = in_group(size, tmp_path / "rendezvous", lambda comm: forward(comm, source), ep=ep)
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("forward", "ep"), SHARDED)
def test_the_ranks_together_read_each_weight_once(forward: Forward, ep: bool, size: int) -> None:
    source = RandomSource()
    for rank in range(size):
        forward(Alone(rank, size, ep=ep), source)
    for name, reads in source.reads.items():
        assert (reads == (size if name in EVERYWHERE else 1)).all(), name


@pytest.mark.parametrize("size", [2, 4])
def test_with_ep_a_rank_reads_whole_experts(size: int) -> None:
    for rank in range(size):
        source = RandomSource()
        experts(Alone(rank, size, ep=True), source, num_experts=8)
        num_own = 8 // size
        own = range(rank * num_own, (rank + 1) * num_own)
        names = {
            f"mlp.experts.{expert}.{part}_proj.weight"
            for expert in own
            for part in ("gate", "up", "down")
        }
        assert source.reads.keys() == names | EVERYWHERE
        assert all((reads == 1).all() for reads in source.reads.values())


def test_experts_are_stacked_as_they_are_read() -> None:
    """The memory of a large model has no room for its experts twice."""
    read: list[weakref.ref[Tensor]] = []
    most = 0

    class Source(RandomSource):
        def read(self, name: str, shape: tuple[int, ...], **parts: range) -> Tensor:
            nonlocal most
            tensor = super().read(name, shape, **parts)
            read.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in read))
            return tensor

    num_experts = 20
    MoELayer(WIDTH, MLP_WIDTH, num_experts, 2, SingleCommunicator(), normalize=True).load(
        Source(), "mlp"
    )
    assert len(read) == 1 + 3 * num_experts
    assert most <= 6


def test_no_tokens_give_no_rows() -> None:
    linear = LinearRowParallel(WIDTH, 3, SingleCommunicator(), bias=True)
    linear.load(RandomSource(), "down")
    linear.choose_kernel(pack=True)
    assert linear.forward(torch.empty(0, WIDTH)).add_up().shape == (0, 3)


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1)])
def test_heads_of_all_ranks_are_the_heads_of_one(size: int, num_kv_heads: int) -> None:
    num_heads = 4
    head_dim = 6

    def heads(info: DistributedInfo) -> tuple[Tensor, Tensor, Tensor]:
        layer = LinearQKVMerged(WIDTH, num_heads, num_kv_heads, head_dim, info, bias=True)
        layer.load(RandomSource(), "attn.qkv_proj")
        return split_heads(layer.forward_heads(X_TD), len(info.shard_kv_heads(num_kv_heads)))

    whole_q, *whole_kv = heads(DistributedInfo())
    of_ranks = [heads(DistributedInfo(rank, size)) for rank in range(size)]
    torch.testing.assert_close(torch.cat([q for q, _, _ in of_ranks], dim=1), whole_q)
    for rank, (_, *kv) in enumerate(of_ranks):
        held = DistributedInfo(rank, size).shard_kv_heads(num_kv_heads)
        torch.testing.assert_close(kv, [x[:, held.start : held.stop] for x in whole_kv])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda info: LinearQKVMerged(WIDTH, 6, 6, 2, info, bias=False), "6 attention heads"),
        (lambda info: LinearQKVMerged(WIDTH, 4, 3, 2, info, bias=False), "3 key/value heads"),
        (
            lambda info: LinearGated(WIDTH, 18, silu_and_mul, info, bias=False),
            "18 outputs of gate_proj",
        ),
    ],
)
def test_what_the_ranks_cannot_divide_is_named(
    make: Callable[[DistributedInfo], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--tp 4 .*{message}"):
        make(DistributedInfo(0, 4))
