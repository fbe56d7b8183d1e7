"""Tokens that a request rules out: all but `allowed_token_ids`, and the last token of each of its `bad_words` where the
others precede it in the answer.

They join the bitmask of its grammar, if it has one. With bad words the mask depends on the tokens before, so they are
read before each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from ...data.tokenizer import Tokenizer
from ...spec import SpecError
from ..grammars.grammar import Grammars
from .request import Sequence as Running
from .sampling_params import SamplingParams
from .scheduler import Chunk

MASKED = attrgetter("sequence.masked")


@dataclass(frozen=True)
class TokenFilter:
    """What one sequence may sample."""

    allowed: np.ndarray  # (words) int32: a bit for each token
    endings: tuple[tuple[tuple[int, ...], int], ...]  # of bad words of several tokens: those before the last, the last

    def bits(self, output: Sequence[int]) -> np.ndarray:
        """(words) int32: tokens that may follow this output."""
        banned = [last for before, last in self.endings if tuple(output[-len(before) :]) == before]
        return self.allowed & ~bits_of(banned, len(self.allowed)) if banned else self.allowed


def bits_of(tokens: Iterable[int], words: int) -> np.ndarray:
    """(words) int32: a bit for each of these tokens."""
    flags = np.zeros(words * 32, np.bool_)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def token_filter(params: SamplingParams, tokenizer: Tokenizer | None, valid: int) -> TokenFilter | None:
    """None: nothing is ruled out."""
    if not params.restricted:
        return None
    words = (valid + 31) // 32
    allowed = (
        np.full(words, -1, np.int32) if params.allowed_token_ids is None else bits_of(params.allowed_token_ids, words)
    )
    endings = []
    for *before, last in spellings(params.bad_words, tokenizer) if tokenizer is not None else ():
        if last >= valid:
            continue  # never sampled
        if before:
            endings.append((tuple(before), last))
        else:
            allowed = allowed & ~bits_of([last], words)
    if not (allowed & bits_of(range(valid), words)).any():
        raise SpecError("bad_words and allowed_token_ids leave no token that could be sampled")
    return TokenFilter(allowed, tuple(endings))


def spellings(bad_words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as tokens, as it begins a text and as it follows a blank, as in vLLM.

    The second one counts only where the blank becomes part of the first token.
    """
    found = []
    for word in bad_words:
        first = tokenizer.encode(word.lstrip())
        later = tokenizer.encode(" " + word.lstrip())
        found.append(first)
        if len(later) == len(first) and later[0] != first[0]:
            found.append(later)
    return found


def token_masks(chunks: Sequence[Chunk], grammars: Grammars | None, valid: int, device: torch.device) -> Tensor | None:
    """(rows, words) int32 on the device, a bit for each token of each row of logits; None: all tokens are allowed.

    Only the first row of a chunk has a mask, as sequences with one do not speculate.
    """
    if not any(map(MASKED, chunks)):
        return None
    rows = [sequence for chunk in chunks for sequence in (chunk.sequence, *[None] * (chunk.num_logits - 1))]
    words = (valid + 31) // 32
    if grammars is not None:
        words = max(words, grammars.mask_words)
    masks = torch.full((len(rows), words), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
    if grammars is not None:
        grammars.fill_masks(masks, [None if sequence is None else sequence.matcher for sequence in rows])
    apply_filters(masks.numpy(), rows)
    return masks.to(device, non_blocking=True)


def apply_filters(masks: np.ndarray, rows: Sequence[Running | None]) -> None:
    for row, sequence in enumerate(rows):
        if sequence is not None and sequence.token_filter is not None:
            # Behind the known tokens is the placeholder of the one that is to be sampled.
            output = sequence.tokens[sequence.num_prompt_tokens : sequence.num_known_tokens]
            allowed = sequence.token_filter.bits(output)
            masks[row, : len(allowed)] &= allowed
