"""A step as tensors: everything that the device must be told, packed into one buffer and sent in one copy.

Sections of the buffer, for T tokens, S sequences, R rows of logits and tables of W blocks:

    int64   tokens, positions, slots (T each) · at, rows, places (R each)
    int32   lengths (S) · starts (S + 1) · late lengths (S) · late starts (S + 1) · tables (S · W)

Each begins at a multiple of 128 bytes, so that kernels see one alignment whatever the sizes; "late" are those of the
sequences behind the ones that decode, once more and counted from there. The block tables of running sequences are kept
from step to step, and only what they grew by is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.inference.paged_attention import Pages
from ...spec import EngineSpec
from .request import PLACEHOLDER_TOKEN, Sequence
from .scheduler import Chunk, Step

SLOTS, ROWS, STARTS = 2, 4, 7  # indices of sections
WIDE = 6  # sections of int64 numbers; those behind them are of int32
ALIGN = 16  # int64 numbers: 128 bytes
NARROWEST = 2048  # tokens that the narrowest table covers; the next covers WIDER times as many, and so on
WIDER = 4


class Layout(NamedTuple):
    """The sizes of a step, and so where the sections of its buffer begin. Without its width it is a frame for steps."""

    tokens: int
    seqs: int
    rows: int
    width: int
    decoding: int  # sequences of one token; they come first
    longest: int  # the most tokens that a sequence computes

    @property
    def size(self) -> int:
        """Of the buffer, in int64 numbers."""
        return sections(self)[-1][1]


@lru_cache(maxsize=4096)
def sections(layout: Layout) -> list[tuple[int, int, int]]:
    """Of each section: where it begins and ends, counted in int64 numbers, and how many numbers it holds."""
    each = [layout.seqs, layout.seqs + 1]
    sizes = [*(3 * [layout.tokens]), *(3 * [layout.rows]), *each, *each, layout.seqs * layout.width]
    room = [math.ceil(size / (ALIGN if i < WIDE else 2 * ALIGN)) * ALIGN for i, size in enumerate(sizes)]
    ends = list(accumulate(room))
    return list(zip([0, *ends], ends, sizes, strict=False))


def cut(buffer: Any, layout: Layout, int32: Any) -> list[Any]:
    """The sections of a buffer, of numpy or of torch."""
    found, narrow = sections(layout), buffer.view(int32)
    wide = [buffer[begin : begin + size] for begin, _, size in found[:WIDE]]
    return wide + [narrow[2 * begin : 2 * begin + size] for begin, _, size in found[WIDE:]]


@dataclass(frozen=True)
class Batch:
    """A step on the device."""

    tokens: Tensor  # (tokens) int64: an id, or vocab + slot: the token that was picked last for that slot
    positions: Tensor  # (tokens) int64
    slots: Tensor  # (tokens) int64: where keys and values go; −1: nowhere
    at: Tensor | None  # (rows) int64: tokens whose logits are wanted; None: all of them
    rows: Tensor  # (rows) int64: the slot of the sequence that each row of logits belongs to
    places: Tensor  # (rows) int64: index, in its answer, of the token that the row picks
    pages: tuple[Pages, ...]
    decoding: int


def unpack(buffer: Tensor, layout: Layout) -> Batch:
    tokens, positions, slots, at, rows, places, lengths, starts, *late, tables = cut(buffer, layout, torch.int32)
    tables, first = tables.view(layout.seqs, layout.width), layout.decoding
    pages: tuple[Pages, ...]
    if first in (0, layout.seqs):
        pages = (Pages(tables, lengths, starts, layout.longest),)
    else:
        few = Pages(tables[:first], lengths[:first], starts[: first + 1], 1)
        rest = layout.seqs - first
        many = Pages(tables[first:], late[0][:rest], late[1][: rest + 1], layout.longest)
        pages = (few, many)
    # Every token decodes for itself: its row of logits is its own.
    every = layout.rows == layout.tokens == layout.seqs
    return Batch(tokens, positions, slots, None if every else at, rows, places, pages, first)


class Packer:
    """Writes steps into buffers, and remembers the block tables of running sequences."""

    def __init__(self, engine: EngineSpec, vocab: int, pinned: bool) -> None:
        self.vocab, self.size, self.pinned = vocab, engine.block, pinned
        self.unused = engine.max_seqs  # the slot of rows that nobody asked for
        self.widest = math.ceil(engine.context / engine.block)
        self.tables = np.zeros((engine.max_seqs + 1, self.widest), np.int32)
        self.filled = np.zeros(engine.max_seqs + 1, np.int64)  # blocks of each table that are written

    def admit(self, sequence: Sequence) -> None:
        self.filled[sequence.slot] = 0

    def width(self, blocks: int) -> int:
        """Of a table for so many blocks: few different ones, as a CUDA graph and a kernel are made for each."""
        width = max(1, NARROWEST // self.size)
        while width < blocks:
            width *= WIDER
        return min(width, self.widest)

    def pack(self, step: Step, bucket: Layout | None = None) -> tuple[Tensor, Layout]:
        """The buffer on the host. `bucket` has room for the step: the places that it does not take are nobody's."""
        chunks = step.chunks
        facts = list(zip(*map(chunk_facts, chunks), strict=True))
        _, _, counts, asked, _, held = facts
        slot, start, count, wanted, prompt, blocks = np.array(facts, np.int64)  # (S) each
        self.update_tables(chunks, slot, blocks)
        seqs, total, rows, single = len(chunks), sum(counts), sum(asked), counts.count(1)
        width = self.width(max(held))
        if bucket is None:
            layout = Layout(total, seqs, rows, width, single, max(counts))
        else:
            layout = bucket._replace(width=width)
        buffer, parts = self.padding_buffer(layout)
        tokens, positions, slots, at, row_slots, places, lengths, starts, *late, tables = parts
        mine, here = np.arange(seqs), np.arange(total)  # (S), (T): the place of each chunk, and of each token
        owner = mine.repeat(count)  # (T): the chunk of each token
        end = start + count
        left = count.cumsum()[owner] - here  # (T): tokens of the chunk from this one on
        position = end[owner] - left
        asking = (left <= wanted[owner]).nonzero()[0]  # (R): the token that each row belongs to
        if layout.decoding > single:  # longer chunks lie behind all the places for those of one token
            mine[single:] += layout.decoding - single
            here[single:] += layout.decoding - single
        slot_of = slot[owner]
        ids = np.array(input_token_ids(chunks), np.int64)
        tokens[here] = np.where(ids == PLACEHOLDER_TOKEN, self.vocab + slot_of, ids)
        positions[here] = position
        block, within = np.divmod(position, self.size)
        slots[here] = self.tables[slot_of, block].astype(np.int64) * self.size + within
        at[:rows] = here[asking]
        row_slots[:rows] = slot_of[asking]
        places[:rows] = (position - prompt[owner])[asking] + 1
        lengths[mine] = end
        starts[1 : layout.decoding + 1] = 1  # nobody's: one each where one is usual
        starts[mine + 1] = count
        starts.cumsum(dtype=np.int32, out=starts)
        tables.reshape(-1, layout.width)[mine] = self.tables[slot, : layout.width]
        if 0 < layout.decoding < layout.seqs:
            rest = layout.seqs - layout.decoding
            late[0][:rest] = lengths[-rest:]
            late[1][: rest + 1] = starts[-rest - 1 :] - layout.decoding
        return buffer, layout

    def dummy_decode(self, bucket: Layout) -> tuple[Tensor, Layout]:
        """A decoding step in which every place is nobody's: it changes nothing."""
        layout = bucket._replace(width=self.width(1))
        buffer, parts = self.padding_buffer(layout)
        parts[STARTS][:] = np.arange(layout.seqs + 1)
        return buffer, layout

    def padding_buffer(self, layout: Layout) -> tuple[Tensor, list[np.ndarray]]:
        """A buffer and its sections. Its places are nobody's: token 0, stored nowhere, of a sequence without keys."""
        buffer = torch.zeros(layout.size, dtype=torch.int64, pin_memory=self.pinned)
        parts = cut(buffer.numpy(), layout, np.int32)
        parts[SLOTS][:], parts[ROWS][:] = -1, self.unused
        return buffer, parts

    def update_tables(self, chunks: list[Chunk], slot: np.ndarray, blocks: np.ndarray) -> None:
        """Write what tables grew by: blocks that a sequence was given stay its own until it is admitted again."""
        for i in (blocks > self.filled[slot]).nonzero()[0].tolist():
            row, end = slot[i], blocks[i]
            begin = self.filled[row]
            self.tables[row, begin:end] = chunks[i].sequence.blocks[begin:end]
            self.filled[row] = end


def decode_bucket(seqs: int, each: int = 1) -> Layout:
    """For steps in which every token asks for the next: so many sequences, of up to `each` tokens."""
    return Layout(seqs * each, seqs, seqs * each, 0, seqs if each == 1 else 0, each)


def mixed_bucket(decoding: int, prompts: int, tokens: int, longest: int) -> Layout:
    """For steps in which so many sequences decode, and others compute so many tokens, each up to `longest`."""
    return Layout(decoding + tokens, decoding + prompts, decoding + prompts, 0, decoding, longest)


def chunk_facts(chunk: Chunk) -> tuple[int, int, int, int, int, int]:
    sequence = chunk.sequence
    return sequence.slot, chunk.start, chunk.count, chunk.wanted, sequence.prompt, len(sequence.blocks)


def input_token_ids(chunks: list[Chunk]) -> list[int]:
    """Of all chunks, one after another; behind the first token of one that speculates come its guesses."""
    ids: list[int] = []
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.count == 1:
            ids.append(sequence.tokens[chunk.start])
        elif chunk.wanted > 1:
            ids += [sequence.tokens[chunk.start], *sequence.draft_tokens]
        else:
            ids += sequence.tokens[chunk.start : chunk.start + chunk.count]
    return ids
