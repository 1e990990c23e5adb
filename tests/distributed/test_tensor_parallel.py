"""Two and four ranks give the tokens and logits of transformers.

Four replicate the kv heads and pad the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.kernel import SEGMENT_SIZE
from minisgl.layers import VocabShard
from tests.checkpoints import ARCHITECTURES, VOCAB_SIZE, save_checkpoint, tiny_model
from tests.distributed.groups import Alone
from tests.distributed.harness import Job, run_ranks
from tests.engine.harness import Answer, random_prompts
from tests.engine.oracle import Oracle, assert_equals_oracle

NUM_TOKENS = 6
PROMPTS = random_prompts([1, 5, 17, 16, 40], VOCAB_SIZE)
RELATED = [[*prompt[: len(prompt) // 2], 7, 8, 9] for prompt in PROMPTS[-2:]]
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
OPTIONS = {"page_size": 4, "num_pages": 16, "max_prefill_length": 24, "overlap": True}
WHOLE_EXPERTS = "qwen3_moe with whole experts"
NAMES = (*ARCHITECTURES, "biased llama", WHOLE_EXPERTS)


@pytest.fixture(scope="module", params=[2, 4])
def answers(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[list[Answer]]]:
    """Answers by model, rank and prompt."""
    biased = save_checkpoint(tiny_model("llama", **BIASED), tmp_path_factory.mktemp("biased"))
    folders = [*map(checkpoint, ARCHITECTURES), biased]
    jobs = [Job(folder, [PROMPTS, RELATED], NUM_TOKENS, OPTIONS) for folder in folders]
    by_expert = {**OPTIONS, "ep": True}
    jobs.append(Job(checkpoint("qwen3_moe"), [PROMPTS, RELATED], NUM_TOKENS, by_expert))
    with TemporaryDirectory() as folder:  # short enough for the names of sockets
        answers_of_ranks = run_ranks(request.param, jobs, Path(folder))
    return {
        name: [answers_of_jobs[job] for answers_of_jobs in answers_of_ranks]
        for job, name in enumerate(NAMES)
    }


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_joined_logits_equal_the_oracles(
    name: str, answers: dict[str, list[list[Answer]]]
) -> None:
    joined = [join(list(of_ranks)) for of_ranks in zip(*answers[name], strict=True)]
    assert_equals_oracle(Oracle(model_of(name)), PROMPTS + RELATED, joined)


def model_of(name: str) -> PreTrainedModel:
    if name == "biased llama":
        return tiny_model("llama", **BIASED)
    return tiny_model("qwen3_moe" if name == WHOLE_EXPERTS else name)


def join(of_ranks: list[Answer]) -> Answer:
    """The first rank's answer, with the logits of all."""
    logits = [answer.logits_TV for answer in of_ranks if answer.logits_TV is not None]
    return replace(of_ranks[0], logits_TV=torch.cat(logits, dim=1)[:, :VOCAB_SIZE])


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_see_the_same_tokens_and_cache_hits(
    name: str, answers: dict[str, list[list[Answer]]]
) -> None:
    seen = [[(a.tokens, a.finish, a.num_cached) for a in of_rank] for of_rank in answers[name]]
    assert all(of_rank == seen[0] for of_rank in seen)
    assert max(num_cached for _, _, num_cached in seen[0]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_has_the_logits_of_its_tokens(
    name: str, answers: dict[str, list[list[Answer]]]
) -> None:
    size = len(answers[name])
    num_segments = -(-VOCAB_SIZE // SEGMENT_SIZE)
    num_columns = -(-num_segments // size) * SEGMENT_SIZE
    for rank, of_rank in enumerate(answers[name]):
        num_own = len(VocabShard(VOCAB_SIZE, Alone(rank, size)).tokens)
        for answer in of_rank:
            assert answer.logits_TV is not None
            assert answer.logits_TV.shape == (NUM_TOKENS, num_columns)
            assert (answer.logits_TV[:, num_own:] == -torch.inf).all()
