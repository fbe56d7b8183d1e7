"""The sampler: from logits to tokens on the device, with the parameters of each sequence in device tables by slot.

The host writes a sequence's row once, at admission, and then knows what a batch needs (`SamplingMetadata`) without
synchronising. Order, as in `transformers`: repetition penalty, presence and frequency penalties, bias, grammar mask,
min_tokens; then temperature, top-k, top-p of what is left, min-p. Log-probabilities are the model's own: log softmax of
its logits in fp32 over the whole vocabulary, before any of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.inference import gumbel_sample, top_k_top_p
from ...spec import SpecError
from .request import Sequence as Running
from .sampling_params import SamplingParams

# Columns of a row of floats; the seed lies in the first two.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, MIN_TOKENS = range(2, 10)
ALL_SLOTS = slice(None)
MIN_TOP_P = 1e-30  # representable in fp32; leaves only the likeliest token
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e9  # beyond these fp32 sampling is greedy, or uniform


class SamplingMetadata(NamedTuple):
    """What a batch needs beyond greedy sampling. What no sequence needs is not computed."""

    noise: bool = False
    truncated: bool = False  # top_k, top_p, min_p
    penalties: bool = False
    bias: bool = False
    min_tokens_ban: bool = False  # min_tokens
    logprobs: bool = False
    top: int = 0  # top_logprobs

    @property
    def plain(self) -> bool:
        """Whether the sampler only makes passes over unmodified logits, which a CUDA graph can capture."""
        return not (self.penalties or self.bias or self.min_tokens_ban or self.top)


class SamplerOutput(NamedTuple):
    tokens: Tensor  # (rows) int64
    logprob: Tensor | None  # (rows) float32, if needed
    top_ids: Tensor | None  # (rows, k) int64, the likeliest first
    top_logprobs: Tensor | None  # (rows, k) float32
    bad: Tensor  # (rows) bool: logits not finite, or no token allowed; the token is then 0


def metadata_of(params: SamplingParams, ends: Sequence[int]) -> SamplingMetadata:
    sampled = not params.greedy
    return SamplingMetadata(
        noise=sampled,
        truncated=sampled and bool(params.top_k or params.top_p < 1 or params.min_p),
        penalties=has_penalties(params),
        bias=bool(params.logit_bias),
        min_tokens_ban=bool(params.min_tokens and ends),
        logprobs=params.needs_logprobs,
        top=params.logprobs or 0,
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether the logits depend on counts of earlier tokens: such a sequence does not speculate."""
    return params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)


def check(params: SamplingParams, valid: int) -> None:
    """Reject token ids outside the vocabulary."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        ids = getattr(params, name) or ()
        wrong = next((i for i in ids if not 0 <= i < valid), None)
        if wrong is not None:
            raise SpecError(f"{name} names token {wrong}: the model's tokens are 0 to {valid - 1}")


class Sampler:
    """Sampling parameters of `max_seqs` slots in device tables, and one more slot for padding rows."""

    def __init__(self, vocab: int, valid: int, max_seqs: int, device: torch.device | str) -> None:
        self.vocab, self.valid, self.slots = vocab, valid, max_seqs + 1
        self.device = torch.device(device)
        self.metadata_by_slot = np.zeros((self.slots, len(SamplingMetadata._fields)), np.int64)
        self.rows = torch.zeros(self.slots, 5, dtype=torch.int64, device=self.device)  # seed, and eight floats
        self.seeds = self.rows[:, 0]
        self.floats = self.rows.view(torch.float32)  # (slots, 10)
        self.bias_ids, self.biases = self.table(0, torch.int64), self.table(0, torch.float32)
        self.end_ids, self.is_end = self.table(0, torch.int64), self.table(0, torch.float32)
        self.output_counts: Tensor | None = None  # (slots, valid) int32: how often the answer holds a token
        self.prompt_mask: Tensor | None = None  # (slots, valid) bool: whether the prompt does

    def table(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.slots, width, dtype=dtype, device=self.device)

    # --- tables, written by the host ---

    def admit(self, slot: int, sequence: Running) -> None:
        """Write the sampling parameters of a sequence to its slot, asynchronously."""
        params, ends = sequence.params, [i for i in sequence.request.end_token_ids if i < self.valid]
        metadata = metadata_of(params, ends)
        self.metadata_by_slot[slot] = metadata
        row = np.zeros(5, np.int64)
        row[0] = sequence.seed
        row.view(np.float32)[2:] = (
            0 if params.greedy else min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE),
            min(params.top_k, self.valid),
            max(params.top_p, MIN_TOP_P),
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.min_tokens,
        )
        self.send(self.rows[slot], row)
        if metadata.bias:
            self.bias_ids, self.biases = (self.widen(t, len(params.logit_bias)) for t in (self.bias_ids, self.biases))
            self.send_list(slot, self.bias_ids, self.biases, params.logit_bias)
        elif self.biases.shape[1]:
            self.biases[slot].zero_()
        if metadata.min_tokens_ban:
            self.end_ids, self.is_end = (self.widen(t, len(ends)) for t in (self.end_ids, self.is_end))
            self.send_list(slot, self.end_ids, self.is_end, dict.fromkeys(ends, 1.0))
        elif self.is_end.shape[1]:
            self.is_end[slot].zero_()
        if metadata.penalties:
            self.count(slot, sequence)

    def send(self, to: Tensor, values: np.ndarray) -> None:
        """Copy asynchronously: pinned memory is kept alive until the copy is done."""
        source = torch.from_numpy(values)
        to.copy_(source.pin_memory() if self.device.type == "cuda" else source, non_blocking=True)

    def widen(self, table: Tensor, width: int) -> Tensor:
        """At least so many columns; unused ones add 0 to token 0."""
        if table.shape[1] >= width:
            return table
        wider = self.table(1 << (width - 1).bit_length(), table.dtype)
        wider[:, : table.shape[1]] = table
        return wider

    def send_list(self, slot: int, ids: Tensor, values: Tensor, items: Mapping[int, float]) -> None:
        row_ids, row_values = np.zeros(ids.shape[1], np.int64), np.zeros(ids.shape[1], np.float32)
        row_ids[: len(items)], row_values[: len(items)] = list(items), list(items.values())
        self.send(ids[slot], row_ids)
        self.send(values[slot], row_values)

    def count(self, slot: int, sequence: Running) -> None:
        """Count its tokens. After a preemption the output has some already; one in flight is counted when sampled."""
        if self.output_counts is None or self.prompt_mask is None:
            self.output_counts, self.prompt_mask = (
                self.table(self.valid, torch.int32),
                self.table(self.valid, torch.bool),
            )
        for table, ids in (
            (self.prompt_mask, sequence.tokens[: sequence.num_prompt_tokens]),
            (self.output_counts, sequence.output_token_ids),
        ):
            counts = np.bincount([i for i in ids if 0 <= i < self.valid], minlength=self.valid)
            self.send(table[slot], counts.astype(bool if table is self.prompt_mask else np.int32))

    def sampling_metadata(self, slots: np.ndarray | Sequence[int] | slice) -> SamplingMetadata:
        """Combined metadata of these slots (padding slots need nothing)."""
        *flags, top = self.metadata_by_slot[slots].max(axis=0, initial=0).tolist()
        return SamplingMetadata._make([*map(bool, flags), top])

    # --- sampling, on the device ---

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        output_positions: Tensor,
        mask: Tensor | None = None,
        sampling_metadata: SamplingMetadata | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of logits (rows, vocab). slots, output_positions: (rows) int64.

        `mask` (rows, ⌈valid/32⌉) int32 holds a bit for each token, 1 where a grammar allows it. `sampling_metadata` is
        what `self.sampling_metadata` gives for the batch; None: of all slots.
        """
        sampling_metadata = sampling_metadata or self.sampling_metadata(ALL_SLOTS)
        # Truncation applies to tokens that a grammar allows; without truncation the sampling kernel applies the mask.
        scores = self.process_logits(
            logits, slots, output_positions, mask if sampling_metadata.truncated else None, sampling_metadata
        )
        threshold = (
            top_k_top_p.score_thresholds(scores, self.truncation(slots)) if sampling_metadata.truncated else None
        )
        rows = (
            gumbel_sample.RowParams(self.floats[:, TEMPERATURE], self.seeds, slots, output_positions)
            if sampling_metadata.noise
            else None
        )
        drawn = gumbel_sample.sample(logits, scores, rows, sampling_metadata.logprobs, threshold, mask)
        top_ids, top_logprobs = (
            top_k_logprobs(logits, self.valid, sampling_metadata.top) if sampling_metadata.top else (None, None)
        )
        # Last: if memory runs out before, the step is repeated.
        if sampling_metadata.penalties and self.output_counts is not None:
            self.output_counts.index_put_((slots, drawn.tokens), torch.ones_like(drawn.tokens, dtype=torch.int32), True)
        return SamplerOutput(drawn.tokens, drawn.logprobs, top_ids, top_logprobs, drawn.bad)

    def distribution(
        self,
        logits: Tensor,
        slots: Tensor,
        output_positions: Tensor,
        mask: Tensor | None = None,
        sampling_metadata: SamplingMetadata | None = None,
    ) -> Tensor:
        """(rows, vocab) float32: sampling probabilities; a greedy row is one-hot."""
        scores = self.truncated_logits(
            logits, slots, output_positions, mask, sampling_metadata or self.sampling_metadata(ALL_SLOTS)
        ).float()
        temperatures = self.floats[slots, TEMPERATURE].unsqueeze(1)
        best = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
        drawn = top_k_top_p.apply_temperature(scores, temperatures).softmax(dim=1)
        probabilities = torch.where(temperatures > 0, drawn, best)
        return torch.nn.functional.pad(probabilities, (0, self.vocab - self.valid))

    def truncation(self, slots: Tensor) -> top_k_top_p.TruncationParams:
        temperatures, top_k, top_p, min_p = self.floats[:, TEMPERATURE : MIN_P + 1].unbind(dim=1)
        return top_k_top_p.TruncationParams(temperatures, top_k, top_p, min_p, slots)

    def truncated_logits(
        self,
        logits: Tensor,
        slots: Tensor,
        output_positions: Tensor,
        mask: Tensor | None,
        sampling_metadata: SamplingMetadata,
    ) -> Tensor:
        """(rows, valid): processed and truncated logits; −∞ for a token that may not be sampled."""
        scores = self.process_logits(logits, slots, output_positions, mask, sampling_metadata)
        if not sampling_metadata.truncated:
            return scores
        threshold = top_k_top_p.score_thresholds(scores, self.truncation(slots)).unsqueeze(1)
        return scores.masked_fill(scores < threshold, -math.inf)

    def process_logits(
        self,
        logits: Tensor,
        slots: Tensor,
        output_positions: Tensor,
        mask: Tensor | None,
        sampling_metadata: SamplingMetadata,
    ) -> Tensor:
        """(rows, valid): logits after penalties, bias, mask and min_tokens (then in fp32), before truncation."""
        scores = logits[:, : self.valid]
        if mask is None and not (
            sampling_metadata.penalties or sampling_metadata.bias or sampling_metadata.min_tokens_ban
        ):
            return scores
        scores = scores.to(torch.float32, copy=True)
        floats = self.floats[slots]  # (rows, 10)
        if sampling_metadata.penalties and self.output_counts is not None and self.prompt_mask is not None:
            scores = penalise(scores, self.output_counts[slots], self.prompt_mask[slots], floats)
        if sampling_metadata.bias:
            scores.scatter_add_(1, self.bias_ids[slots], self.biases[slots])
        if mask is not None:
            scores.masked_fill_(~gumbel_sample.unpack_mask(mask, self.valid), -math.inf)
        if sampling_metadata.min_tokens_ban:
            early = (output_positions < floats[:, MIN_TOKENS]).unsqueeze(1) & (self.is_end[slots] > 0)
            most = torch.full_like(early, math.inf, dtype=scores.dtype).masked_fill_(early, -math.inf)
            scores.scatter_reduce_(1, self.end_ids[slots], most, "amin")
        return scores


def penalise(scores: Tensor, output_counts: Tensor, prompt_mask: Tensor, floats: Tensor) -> Tensor:
    """Repetition, presence and frequency penalties. output_counts: (rows, valid) int32, prompt_mask: bool."""
    repetition, presence, frequency = (floats[:, i : i + 1] for i in (REPETITION, PRESENCE, FREQUENCY))
    inside = output_counts > 0
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(inside | prompt_mask, repeated, scores)
    return scores - presence * inside - frequency * output_counts


def top_k_logprobs(logits: Tensor, valid: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, and their log-probabilities."""
    wide = logits.float()
    values, ids = wide[:, :valid].topk(min(count, valid), dim=1)
    return ids, values - wide.logsumexp(dim=1, keepdim=True)
