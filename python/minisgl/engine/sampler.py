"""From the logits of a step to tokens in the token pool, equal on all ranks.

A token is drawn from the softmax of (filtered) logits / temperature, by Gumbel noise for segments
of the vocabulary, then for the tokens of one (`kernel/sample.py`). The noise is a function of the
request's seed, the position, and the segment or token. A request's token therefore depends on its
own logits, parameters, seed and position, and on no other request.

With several ranks each has a part of the vocabulary (`layers/vocab_shard.py`). It masks, changes
and scores its own logits, and draws a token of its best segment. Ranks exchange one number per
request, made of this token and its segment's score, and all take the best. Filters look at the
whole vocabulary: logits are joined on all ranks in steps with a filter, and on rank 0 for the
requests that want logprobs.

`Sampler.sample` does what every request needs, and is what graphs capture. It masks logits in
place, so those from which logprobs are made are copied before. Some requests change the model's
logits (bias, penalties). A step with such a request runs `Sampler.sample` eagerly, which then
samples the changed rows again.

    ModelRunner.sample       a launched step: sample, then start the copy to the host
    Sampler.sample_slices    replay the graph or sample eagerly; take logprobs
    Sampler.sample           mask, sample, write to the token pool
    sample_logits            filters, then the kernel, then the best of all ranks
    kernel.choose_tokens     draw a segment, then a token of it
"""

# Dimensions: B requests of a step, or of a captured graph, L positions of a sequence, R rows of the
# tables, V vocabulary, W words of 32 bits, X a selection out of another dimension, Z entries of a
# flat list.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.engine.graphs.capture import Graph
from minisgl.engine.logits_processing import process_logits, processing_capacity, wants_processing
from minisgl.engine.logprobs import LogprobsOutput, Scores
from minisgl.engine.sampling_batch import SamplingNumbers, sampling_capacity, send_sampling
from minisgl.kernel import choose_scored_tokens, choose_tokens, lowest_kept, scatter
from minisgl.layers import VocabShard
from minisgl.utils.staging import Staging, capacity_for

_MAX_PROCESSED_ROWS = 32  # of logits at a time, since processing takes many copies of them


@dataclass(slots=True)
class SamplingInputs:
    """The sampler's inputs from a step whose logits are being computed; padding comes last.

    Attributes:
        logits_BV: of this rank's tokens; None where no slice samples, and until they are computed.
        sampled_index_B: int32, flat indices of the token pool: where the tokens are written.
        is_filtered: whether to look at the filters.
        is_masked: whether logits have to be masked first.
    """

    logits_BV: Tensor | None
    numbers: SamplingNumbers[Tensor]
    sampled_index_B: Tensor
    is_filtered: bool
    is_masked: bool


@dataclass(frozen=True, slots=True)
class SamplingGraph:
    """A graph that does what `Sampler.sample` does with the inputs of a captured step.

    Attributes:
        token_B: where it leaves the tokens; valid until the next replay of any graph.
    """

    graph: Graph
    token_B: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.token_B


@dataclass(slots=True)
class SampledTokens:
    """The results of the sampling slices of a step.

    Attributes:
        token_B: int32, without padding.
        logprobs: of those that want them; None if none does, and on other ranks than the first.
    """

    token_B: Tensor
    logprobs: LogprobsOutput | None


def sample_logits(
    logits_BV: Tensor, numbers: SamplingNumbers[Tensor], vocab: VocabShard, *, is_filtered: bool
) -> Tensor:
    """Choose one token per request, of this rank's logits, which are masked.

    Args:
        is_filtered: whether to look at the filters.

    Returns:
        token_B: int32, the same on all ranks.
    """
    lowest_B = None
    if is_filtered:
        whole_BV = vocab.join(logits_BV)
        lowest_B = lowest_kept(
            whole_BV, numbers.temperature_B, numbers.top_k_B, numbers.top_p_B, numbers.min_p_B
        )
    noise = (numbers.temperature_B, numbers.seed_Z.view(-1, 2), numbers.position_B)
    if vocab.is_whole:
        return choose_tokens(logits_BV, lowest_B, *noise)
    return vocab.agree(choose_scored_tokens(logits_BV, lowest_B, *noise, vocab.first_token))


def sampler_capacity(num_slices: int, num_eos: int) -> int:
    """The capacity of a staging that sends what a `Sampler` needs for `num_slices`."""
    num_processed = min(num_slices, _MAX_PROCESSED_ROWS)
    return max(
        capacity_for(num_slices),
        sampling_capacity(num_processed),
        processing_capacity(num_processed, num_eos),
    )


class Sampler:
    """Chooses the tokens of a step, equally on all ranks.

    Args:
        staging: for what is sent between a step's logits and its tokens.

    Attributes:
        vocab: the tokens of this rank.
        masks_XW: the grammar masks of the step that is sampled next, as `mask_logits` takes them.
            They stay on the host: a step reads them once, so a copy to the device would cost a
            launch and save nothing.
    """

    def __init__(
        self,
        vocab: VocabShard,
        token_pool_RL: Tensor,
        eos_ids: frozenset[int],
        staging: Staging,
    ) -> None:
        self.vocab = vocab
        self._token_pool_RL = token_pool_RL
        self._eos_ids = eos_ids
        self._staging = staging
        num_words = -(-vocab.size // 32)
        self.masks_XW = torch.full(
            (len(token_pool_RL), num_words),
            -1,
            dtype=torch.int32,
            pin_memory=token_pool_RL.is_cuda,
        )

    def sample_slices(
        self, slices: list[ReqSlice], inputs: SamplingInputs, graph: SamplingGraph | None
    ) -> SampledTokens:
        """Start choosing the tokens of a step's slices.

        Whether the graph is replayed depends on the slices alone, so all ranks do the same.

        Args:
            slices: those that sample, at least one.
            inputs: whose logits are masked here, in place.
            graph: captured with these inputs, if there is one.
        """
        special = [
            (i, req_slice)
            for i, req_slice in enumerate(slices)
            if not req_slice.req.needs_only_sampling
        ]
        processed = [(i, req_slice) for i, req_slice in special if wants_processing(req_slice)]
        num_top = {
            i: req_slice.req.params.logprobs
            for i, req_slice in special
            if req_slice.req.params.logprobs is not None
        }
        unmasked_XV = None  # without logprobs, and on every rank but the first
        if num_top:
            assert inputs.logits_BV is not None
            index_X = self.to_device_index(num_top)
            unmasked_XV = self.vocab.collect(inputs.logits_BV[index_X])

        if processed:
            graph = None  # it would choose from the model's logits
        token_B = graph.replay() if graph else self.sample(inputs, processed)

        logprobs = None
        if unmasked_XV is not None:
            scores = Scores.of(unmasked_XV, token_B[index_X], max(num_top.values()))
            logprobs = LogprobsOutput(list(num_top), scores, list(num_top.values()))
        return SampledTokens(token_B[: len(slices)], logprobs)

    def sample(
        self, inputs: SamplingInputs, processed: Sequence[tuple[int, ReqSlice]] = ()
    ) -> Tensor:
        """Choose tokens, int32 [B], and write them to the token pool too.

        Args:
            processed: the slices whose logits are to be changed, with their index; none when this
                is captured.
        """
        logits_BV = inputs.logits_BV
        assert logits_BV is not None
        if inputs.is_masked:
            self.vocab.mask(logits_BV, inputs.numbers.mask_B, self.masks_XW)
        token_B = sample_logits(
            logits_BV, inputs.numbers, self.vocab, is_filtered=inputs.is_filtered
        )
        for begin in range(0, len(processed), _MAX_PROCESSED_ROWS):
            some = processed[begin : begin + _MAX_PROCESSED_ROWS]
            self._sample_again(token_B, logits_BV, some)
        scatter(self._token_pool_RL, inputs.sampled_index_B, token_B)
        return token_B

    def _sample_again(
        self, token_B: Tensor, logits_BV: Tensor, processed: Sequence[tuple[int, ReqSlice]]
    ) -> None:
        index_X = self.to_device_index(i for i, _ in processed)
        slices = [req_slice for _, req_slice in processed]
        logits_XV = logits_BV[index_X].float()
        process_logits(
            logits_XV,
            slices,
            self._token_pool_RL,
            self._eos_ids,
            self.vocab.tokens,
            self._staging,
        )
        numbers, is_filtered = send_sampling(slices, self._staging)
        token_B[index_X] = sample_logits(logits_XV, numbers, self.vocab, is_filtered=is_filtered)

    def to_device_index(self, rows: Iterable[int]) -> Tensor:
        """Send numbers of rows to the device, as an index of its tensors: int64."""
        [index_X] = self._staging.send(np.fromiter(rows, dtype=np.int32))
        return index_X.long()
