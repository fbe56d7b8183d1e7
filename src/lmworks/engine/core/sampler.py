"""From logits to tokens, on the device: what every running sequence asked for lies in tables by slot.

The host writes a sequence's row once, when it is admitted, and from then on knows what a batch needs
(`SamplingMetadata`) without asking the device. Order, as in `transformers`: repetition penalty, presence and frequency
penalties, bias, grammar mask, min_tokens' ban; then temperature, top-k, top-p of what is left, min-p. Log-probabilities
are those of the model itself: log softmax of its logits in fp32 over its whole vocabulary, before any of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
MIN_TOP_P = 1e-30  # which fp32 holds; no token but the likeliest is left by it
MIN_TEMPERATURE, MAX_TEMPERATURE = (
    1e-30,
    1e9,
)  # beyond them a temperature is greedy, or uniform, to the last bit of fp32


@dataclass(frozen=True)
class SamplingMetadata:
    """What a batch needs beyond the first of the likeliest tokens. What nobody wants is not computed."""

    noise: bool = False
    truncated: bool = False  # top_k, top_p, min_p
    penalties: bool = False
    bias: bool = False
    ban: bool = False  # min_tokens
    logprobs: bool = False
    top: int = 0  # likeliest tokens to list with the log-probabilities

    def __or__(self, other: SamplingMetadata) -> SamplingMetadata:
        return SamplingMetadata(
            self.noise or other.noise,
            self.truncated or other.truncated,
            self.penalties or other.penalties,
            self.bias or other.bias,
            self.ban or other.ban,
            self.logprobs or other.logprobs,
            max(self.top, other.top),
        )

    @property
    def plain(self) -> bool:
        """Nothing but passes over the logits as they are, which a CUDA graph may hold."""
        return not (self.penalties or self.bias or self.ban or self.top)


class SamplerOutput(NamedTuple):
    tokens: Tensor  # (rows) int64
    logprob: Tensor | None  # (rows) float32, where someone wants it
    top_ids: Tensor | None  # (rows, k) int64, the likeliest first
    top_logprobs: Tensor | None  # (rows, k) float32
    bad: Tensor  # (rows) bool: logits that are not finite, or no token allowed; the token is then 0


def wishes(params: SamplingParams, ends: Sequence[int]) -> SamplingMetadata:
    sampled = not params.greedy
    return SamplingMetadata(
        noise=sampled,
        truncated=sampled and bool(params.top_k or params.top_p < 1 or params.min_p),
        penalties=has_penalties(params),
        bias=bool(params.logit_bias),
        ban=bool(params.min_tokens and ends),
        logprobs=params.needs_logprobs,
        top=params.logprobs or 0,
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether the next token depends on a count of those before it: speculation leaves such a sequence alone."""
    return params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)


def check(params: SamplingParams, valid: int) -> None:
    """Refuse, when a request comes in, tokens that the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        wrong = next((i for i in ids if not 0 <= i < valid), None)
        if wrong is not None:
            raise SpecError(f"{name} names token {wrong}: the model's tokens are 0 to {valid - 1}")


class Sampler:
    """Tables of `max_seqs` slots, and one more that rows of padding may name."""

    def __init__(self, vocab: int, valid: int, max_seqs: int, device: torch.device | str) -> None:
        self.vocab, self.valid, self.slots = vocab, valid, max_seqs + 1
        self.device = torch.device(device)
        self.asked: dict[int, SamplingMetadata] = {}  # by slot
        self.rows = torch.zeros(self.slots, 5, dtype=torch.int64, device=self.device)  # seed, and eight floats
        self.seeds = self.rows[:, 0]
        self.floats = self.rows.view(torch.float32)  # (slots, 10)
        self.bias_ids, self.biases = self.table(0, torch.int64), self.table(0, torch.float32)
        self.end_ids, self.is_end = self.table(0, torch.int64), self.table(0, torch.float32)
        self.answered: Tensor | None = None  # (slots, valid) int32: how often the answer holds a token
        self.prompted: Tensor | None = None  # (slots, valid) bool: whether the prompt does

    def table(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.slots, width, dtype=dtype, device=self.device)

    # --- what the host writes ---

    def admit(self, slot: int, sequence: Running) -> None:
        """The sequence was given this slot: write its wishes there. Queued on the device like any other work."""
        params, ends = sequence.params, [i for i in sequence.request.ends if i < self.valid]
        asked = self.asked[slot] = wishes(params, ends)
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
        if asked.bias:
            self.bias_ids, self.biases = (self.widened(t, len(params.logit_bias)) for t in (self.bias_ids, self.biases))
            self.send_list(slot, self.bias_ids, self.biases, params.logit_bias)
        elif self.biases.shape[1]:
            self.biases[slot].zero_()
        if asked.ban:
            self.end_ids, self.is_end = (self.widened(t, len(ends)) for t in (self.end_ids, self.is_end))
            self.send_list(slot, self.end_ids, self.is_end, dict.fromkeys(ends, 1.0))
        elif self.is_end.shape[1]:
            self.is_end[slot].zero_()
        if asked.penalties:
            self.count(slot, sequence)

    def send(self, to: Tensor, values: np.ndarray) -> None:
        """Copy without waiting: a page-locked source is kept alive until the copy is done."""
        source = torch.from_numpy(values)
        to.copy_(source.pin_memory() if self.device.type == "cuda" else source, non_blocking=True)

    def widened(self, table: Tensor, width: int) -> Tensor:
        """At least so many columns; those that a row does not use add 0 to token 0."""
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
        """Tokens so far. After a preemption the answer has some already; an unknown one is counted when picked."""
        if self.answered is None or self.prompted is None:
            self.answered, self.prompted = self.table(self.valid, torch.int32), self.table(self.valid, torch.bool)
        for table, ids in ((self.prompted, sequence.tokens[: sequence.prompt]), (self.answered, sequence.answer)):
            counts = np.bincount([i for i in ids if 0 <= i < self.valid], minlength=self.valid)
            self.send(table[slot], counts.astype(bool if table is self.prompted else np.int32))

    def sampling_metadata(self, slots: Iterable[int]) -> SamplingMetadata:
        """What a batch of these slots needs (those of padding need nothing)."""
        needed = SamplingMetadata()
        for each in {self.asked[slot] for slot in slots if slot in self.asked}:
            needed |= each
        return needed

    # --- what the device does ---

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        places: Tensor,
        mask: Tensor | None = None,
        sampling_metadata: SamplingMetadata | None = None,
    ) -> SamplerOutput:
        """One token for each row: logits (rows, vocab); slots, places (rows) int64: index of the token in its answer.

        `mask` (rows, ⌈valid/32⌉) int32 holds a bit for each token, 1 where a grammar allows it. `sampling_metadata` is
        what `self.sampling_metadata` said of the batch; None: what any slot wants.
        """
        sampling_metadata = sampling_metadata or self.sampling_metadata(self.asked)
        # What is cut is cut of the tokens that a grammar allows; else its mask can wait for the pass that draws.
        scores = self.changed(logits, slots, places, mask if sampling_metadata.truncated else None, sampling_metadata)
        least = top_k_top_p.least_scores(scores, self.cuts(slots)) if sampling_metadata.truncated else None
        rows = (
            gumbel_sample.Rows(self.floats[:, TEMPERATURE], self.seeds, slots, places)
            if sampling_metadata.noise
            else None
        )
        drawn = gumbel_sample.draw(logits, scores, rows, sampling_metadata.logprobs, least, mask)
        top_ids, top_logprobs = (
            top_k_logprobs(logits, self.valid, sampling_metadata.top) if sampling_metadata.top else (None, None)
        )
        if (
            sampling_metadata.penalties and self.answered is not None
        ):  # last: if memory runs out before, the step is taken again
            self.answered.index_put_((slots, drawn.tokens), torch.ones_like(drawn.tokens, dtype=torch.int32), True)
        return SamplerOutput(drawn.tokens, drawn.logprobs, top_ids, top_logprobs, drawn.bad)

    def distribution(
        self,
        logits: Tensor,
        slots: Tensor,
        places: Tensor,
        mask: Tensor | None = None,
        sampling_metadata: SamplingMetadata | None = None,
    ) -> Tensor:
        """(rows, vocab) float32: the probabilities that tokens are drawn with; a greedy row has all on one token."""
        scores = self.scores(
            logits, slots, places, mask, sampling_metadata or self.sampling_metadata(self.asked)
        ).float()
        temperatures = self.floats[slots, TEMPERATURE].unsqueeze(1)
        best = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
        drawn = top_k_top_p.cooled(scores, temperatures).softmax(dim=1)
        probabilities = torch.where(temperatures > 0, drawn, best)
        return torch.nn.functional.pad(probabilities, (0, self.vocab - self.valid))

    def cuts(self, slots: Tensor) -> top_k_top_p.Cuts:
        temperatures, top_k, top_p, min_p = self.floats[:, TEMPERATURE : MIN_P + 1].unbind(dim=1)
        return top_k_top_p.Cuts(temperatures, top_k, top_p, min_p, slots)

    def scores(
        self, logits: Tensor, slots: Tensor, places: Tensor, mask: Tensor | None, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """(rows, valid): the logits as the sequences asked them to be; −∞ for a token that may not be picked."""
        scores = self.changed(logits, slots, places, mask, sampling_metadata)
        if not sampling_metadata.truncated:
            return scores
        least = top_k_top_p.least_scores(scores, self.cuts(slots)).unsqueeze(1)
        return scores.masked_fill(scores < least, -math.inf)

    def changed(
        self, logits: Tensor, slots: Tensor, places: Tensor, mask: Tensor | None, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """(rows, valid): the logits, in fp32 where something was done to them, before anything is cut."""
        scores = logits[:, : self.valid]
        if mask is None and not (sampling_metadata.penalties or sampling_metadata.bias or sampling_metadata.ban):
            return scores
        scores = scores.to(torch.float32, copy=True)
        floats = self.floats[slots]  # (rows, 10)
        if sampling_metadata.penalties and self.answered is not None and self.prompted is not None:
            scores = penalise(scores, self.answered[slots], self.prompted[slots], floats)
        if sampling_metadata.bias:
            scores.scatter_add_(1, self.bias_ids[slots], self.biases[slots])
        if mask is not None:
            scores.masked_fill_(~gumbel_sample.unpacked(mask, self.valid), -math.inf)
        if sampling_metadata.ban:
            early = (places < floats[:, MIN_TOKENS]).unsqueeze(1) & (self.is_end[slots] > 0)
            most = torch.full_like(early, math.inf, dtype=scores.dtype).masked_fill_(early, -math.inf)
            scores.scatter_reduce_(1, self.end_ids[slots], most, "amin")
        return scores


def penalise(scores: Tensor, answered: Tensor, prompted: Tensor, floats: Tensor) -> Tensor:
    """Less for tokens that were there before: answered (rows, valid) counts, prompted (rows, valid) bool."""
    repetition, presence, frequency = (floats[:, i : i + 1] for i in (REPETITION, PRESENCE, FREQUENCY))
    inside = answered > 0
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(inside | prompted, repeated, scores)
    return scores - presence * inside - frequency * answered


def top_k_logprobs(logits: Tensor, valid: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, and log softmax(logits) of them."""
    wide = logits.float()
    values, ids = wide[:, :valid].topk(min(count, valid), dim=1)
    return ids, values - wide.logsumexp(dim=1, keepdim=True)
