"""The inputs of a step, packed into one buffer and sent to the device in one copy.

Sections of the buffer, for T tokens, S sequences, R rows of logits and block tables of W blocks:

    int64   tokens, positions, slot_mapping (T each) · logits_indices, rows, output_positions (R each)
    int32   seq_lens (S) · query_start_loc (S + 1) · the same two for prefills alone · shared prefixes (S, S, and P + 1
            for P tiles, or none) · key_starts of prefills (or none) · block_tables (S · W)

Each section is aligned to 128 bytes, so that kernels see one alignment for all sizes. Decoding sequences come first;
the sections for prefills repeat the lengths and offsets of the sequences behind them, counted from there. The block
tables of running sequences are kept from step to step, and only new blocks are written.

**Long prompts.** Keys of a step with a long chunk are gathered before attention, in every layer; they have room for a
power of two of them in a bucket.
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

from ...kernels.inference.paged_attention import GATHER_UNIT, AttentionMetadata, SharedPrefixes
from ...spec import EngineSpec
from .request import PLACEHOLDER_TOKEN, Sequence
from .scheduler import Chunk, Step
from .shared_prefixes import PrefixFinder

SLOT_MAPPING, ROW_SLOTS, QUERY_START_LOC = 2, 4, 7  # indices of sections
NUM_INT64_SECTIONS = 6  # the sections after them are int32
ALIGN = 16  # int64 numbers: 128 bytes
MIN_TABLE_TOKENS = 2048  # covered by the narrowest block table; the next is TABLE_GROWTH times as wide, and so on
TABLE_GROWTH = 4
LONG_CHUNK = 1024  # tokens of a sequence in a step, beyond which gathering keys saves more than it takes


class Layout(NamedTuple):
    """The sizes of a step, which determine the sections of its buffer. A bucket of decode steps has no width yet."""

    tokens: int
    seqs: int
    rows: int
    width: int
    num_decodes: int  # sequences of one token; they come first
    max_query_len: int  # most tokens that a sequence computes in the step
    shared_tiles: int = 0  # of sequences that share a prefix; 0: none do
    keys: int = 0  # room for the keys of prefills; 0: they are not gathered

    @property
    def size(self) -> int:
        """Of the buffer, in int64 numbers."""
        return sections(self)[-1][1]


@lru_cache(maxsize=4096)
def sections(layout: Layout) -> list[tuple[int, int, int]]:
    """Begin and end of each section, in int64 numbers, and how many elements it holds."""
    each = [layout.seqs, layout.seqs + 1]
    shared = [layout.seqs, layout.seqs, layout.shared_tiles + 1] if layout.shared_tiles else [0, 0, 0]
    shared.append(layout.seqs + 1 if layout.keys else 0)
    sizes = [*(3 * [layout.tokens]), *(3 * [layout.rows]), *each, *each, *shared, layout.seqs * layout.width]
    room = [math.ceil(size / (ALIGN if i < NUM_INT64_SECTIONS else 2 * ALIGN)) * ALIGN for i, size in enumerate(sizes)]
    ends = list(accumulate(room))
    return list(zip([0, *ends], ends, sizes, strict=False))


def split_sections(buffer: Any, layout: Layout, int32: Any) -> list[Any]:
    """The sections of a buffer, of numpy or of torch."""
    found, narrow = sections(layout), buffer.view(int32)
    wide = [buffer[begin : begin + size] for begin, _, size in found[:NUM_INT64_SECTIONS]]
    return wide + [narrow[2 * begin : 2 * begin + size] for begin, _, size in found[NUM_INT64_SECTIONS:]]


@dataclass(frozen=True)
class Batch:
    """The inputs of a step on the device."""

    tokens: Tensor  # (tokens) int64: an id, or vocab + slot: the last token sampled for that slot
    positions: Tensor  # (tokens) int64
    slot_mapping: Tensor  # (tokens) int64: KV cache slot of each token; −1: none
    logits_indices: Tensor | None  # (rows) int64: tokens whose logits are needed; None: all
    rows: Tensor  # (rows) int64: the slot of the sequence that each row of logits belongs to
    output_positions: Tensor  # (rows) int64: index, in its output, of the token that the row samples
    attention_metadata: tuple[AttentionMetadata, ...]
    num_decodes: int


def unpack(buffer: Tensor, layout: Layout) -> Batch:
    (
        tokens, positions, slot_mapping, logits_indices, rows, output_positions, lengths, starts, *prefill,
        shared_lengths, members, tile_starts, key_starts, tables,
    ) = split_sections(buffer, layout, torch.int32)  # fmt: skip
    tables, first = tables.view(layout.seqs, layout.width), layout.num_decodes
    gathered = (key_starts[: layout.seqs - first + 1], layout.keys) if layout.keys else (None, 0)
    attention_metadata: tuple[AttentionMetadata, ...]
    if first in (0, layout.seqs):
        shared = SharedPrefixes(shared_lengths, members, tile_starts) if layout.shared_tiles else None
        attention_metadata = (AttentionMetadata(tables, lengths, starts, layout.max_query_len, shared, *gathered),)
    else:
        decode_metadata = AttentionMetadata(tables[:first], lengths[:first], starts[: first + 1], 1)
        rest = layout.seqs - first
        prefill_metadata = AttentionMetadata(
            tables[first:], prefill[0][:rest], prefill[1][: rest + 1], layout.max_query_len, None, *gathered
        )
        attention_metadata = (decode_metadata, prefill_metadata)
    # A decode step: one token and one row of logits for each sequence.
    every = layout.rows == layout.tokens == layout.seqs
    return Batch(
        tokens,
        positions,
        slot_mapping,
        None if every else logits_indices,
        rows,
        output_positions,
        attention_metadata,
        first,
    )


class Packer:
    """Packs steps into buffers, and keeps the block tables of running sequences."""

    def __init__(self, engine: EngineSpec, vocab: int, pinned: bool, sharing: int = 0, gathers: bool = False) -> None:
        """`sharing`: sequences that attention lets read a shared prefix together; 0: it cannot. `gathers`: whether it
        gathers the keys of long prompts."""
        self.vocab, self.block_size, self.pinned, self.gathers = vocab, engine.block, pinned, gathers
        self.prefixes = PrefixFinder(engine.block, sharing)
        self.padding_slot = engine.max_seqs  # the slot of padding rows
        self.max_blocks_per_seq = math.ceil(engine.context / engine.block)
        self.tables = np.zeros((engine.max_seqs + 1, self.max_blocks_per_seq), np.int32)
        self.num_written = np.zeros(engine.max_seqs + 1, np.int64)  # blocks of each table that are written
        self.num_prompt_tokens = np.zeros(engine.max_seqs + 1, np.int64)

    def admit(self, sequence: Sequence) -> None:
        self.num_written[sequence.slot] = 0
        self.prefixes.forget()
        self.num_prompt_tokens[sequence.slot] = sequence.num_prompt_tokens

    def width(self, blocks: int) -> int:
        """Block table width for so many blocks: one of a few, as each needs its own CUDA graph."""
        width = max(1, MIN_TABLE_TOKENS // self.block_size)
        while width < blocks:
            width *= TABLE_GROWTH
        return min(width, self.max_blocks_per_seq)

    def pack(self, step: Step, bucket: Layout | None = None) -> tuple[Tensor, Layout]:
        """The buffer on the host, padded to `bucket` if one is given."""
        chunks, slot = step.chunks, step.slots
        start = np.array([chunk.start for chunk in chunks], np.int64)  # (S)
        if step.single_tokens:
            count = wanted = np.ones(len(chunks), np.int64)
        else:
            count, wanted = np.array([(chunk.count, chunk.num_logits) for chunk in chunks], np.int64).T
        end = start + count
        self.update_tables(chunks, slot, end)
        seqs, total, rows, single = len(chunks), step.tokens, step.rows, int((count == 1).sum())
        width = self.width(int(self.num_written[slot].max()))
        if bucket is None:
            keys = gathered_keys(end[count > 1], count) if self.gathers else 0
            layout = Layout(total, seqs, rows, width, single, int(count.max()), keys=keys)
        else:
            layout = bucket if bucket.width else bucket._replace(width=width)
        shared = self.prefixes.find(self.tables, slot, end) if step.single_tokens else None
        if shared is not None:
            layout = layout._replace(shared_tiles=self.prefixes.max_tiles(layout.seqs))
        buffer, parts = self.padding_buffer(layout)
        (
            tokens,
            positions,
            slot_mapping,
            logits_indices,
            row_slots,
            output_positions,
            lengths,
            starts,
            *prefill,
            shared_lengths,
            members,
            tile_starts,
            key_starts,
            tables,
        ) = parts
        chunk_rows, token_rows = np.arange(seqs), np.arange(total)  # (S), (T): row of each chunk and of each token
        owner = chunk_rows.repeat(count)  # (T): the chunk of each token
        left = count.cumsum()[owner] - token_rows  # (T): tokens of the chunk from this one on
        position = end[owner] - left
        logits_tokens = (left <= wanted[owner]).nonzero()[0]  # (R): the token of each row of logits
        if layout.num_decodes > single:  # prefills come after the padded decodes
            chunk_rows[single:] += layout.num_decodes - single
            token_rows[single:] += layout.num_decodes - single
        slot_of = slot[owner]
        ids = np.array(input_token_ids(step), np.int64)
        tokens[token_rows] = np.where(ids == PLACEHOLDER_TOKEN, self.vocab + slot_of, ids)
        positions[token_rows] = position
        block, within = np.divmod(position, self.block_size)
        slot_mapping[token_rows] = self.tables[slot_of, block].astype(np.int64) * self.block_size + within
        logits_indices[:rows] = token_rows[logits_tokens]
        row_slots[:rows] = slot_of[logits_tokens]
        output_positions[:rows] = (position - self.num_prompt_tokens[slot_of])[logits_tokens] + 1
        lengths[chunk_rows] = end
        starts[1 : layout.num_decodes + 1] = 1  # padded decodes have one token each
        starts[chunk_rows + 1] = count
        starts.cumsum(dtype=np.int32, out=starts)
        tables.reshape(-1, layout.width)[chunk_rows] = self.tables[slot, : layout.width]
        if shared is not None:
            shared_lengths[:seqs], members[: len(shared.members)] = shared.lengths, shared.members
            tile_starts[:] = len(shared.members)
            tile_starts[: len(shared.tile_starts)] = shared.tile_starts
        if layout.keys:
            key_starts[1 : layout.seqs - layout.num_decodes + 1] = room_for(lengths[layout.num_decodes :]).cumsum()
        if 0 < layout.num_decodes < layout.seqs:
            rest = layout.seqs - layout.num_decodes
            prefill[0][:rest] = lengths[-rest:]
            prefill[1][: rest + 1] = starts[-rest - 1 :] - layout.num_decodes
        return buffer, layout

    def dummy_step(self, bucket: Layout) -> tuple[Tensor, Layout]:
        """A step of padding only: it changes no state."""
        layout = bucket if bucket.width else bucket._replace(width=self.width(1))
        buffer, parts = self.padding_buffer(layout)
        parts[QUERY_START_LOC][:] = np.arange(layout.seqs + 1)
        return buffer, layout

    def padding_buffer(self, layout: Layout) -> tuple[Tensor, list[np.ndarray]]:
        """A buffer of padding, and its sections: token 0, written to no slot, of sequences of length 0."""
        buffer = torch.empty(layout.size, dtype=torch.int64, pin_memory=self.pinned)
        numbers = buffer.numpy()
        numbers.fill(0)  # by numpy: torch would wake its threads for it
        parts = split_sections(numbers, layout, np.int32)
        parts[SLOT_MAPPING][:], parts[ROW_SLOTS][:] = -1, self.padding_slot
        return buffer, parts

    def update_tables(self, chunks: list[Chunk], slot: np.ndarray, end: np.ndarray) -> None:
        """Write new blocks to the tables of sequences that compute up to `end`.

        A sequence keeps its blocks until it is admitted again.
        """
        for i in (end > self.num_written[slot] * self.block_size).nonzero()[0].tolist():
            row, blocks = slot[i], chunks[i].sequence.blocks
            begin = self.num_written[row]
            self.tables[row, begin : len(blocks)] = blocks[begin:]
            self.num_written[row] = len(blocks)


def room_for(lengths: np.ndarray) -> np.ndarray:
    """Keys of each sequence where they are gathered."""
    return -(-lengths // GATHER_UNIT) * GATHER_UNIT


def gathered_keys(ends: np.ndarray, counts: np.ndarray) -> int:
    """Of prefills up to `ends`, of a step with `counts`; 0 if it has no long chunk."""
    return int(room_for(ends).sum()) if counts.max() > LONG_CHUNK else 0


def decode_bucket(seqs: int, tokens_per_seq: int = 1) -> Layout:
    """For decode steps of so many sequences, with up to `tokens_per_seq` tokens each."""
    return Layout(
        seqs * tokens_per_seq, seqs, seqs * tokens_per_seq, 0, seqs if tokens_per_seq == 1 else 0, tokens_per_seq
    )


def mixed_bucket(
    num_decodes: int, prompts: int, tokens: int, max_query_len: int, width: int = 0, keys: int = 0
) -> Layout:
    """For steps with `num_decodes` sequences, and `prompts` prefills of `tokens` in all, each up to `max_query_len`."""
    seqs = num_decodes + prompts
    return Layout(num_decodes + tokens, seqs, seqs, width, num_decodes, max_query_len, keys=keys)


def input_token_ids(step: Step) -> list[int]:
    """Of all chunks, concatenated; a speculating chunk is its last token followed by its draft tokens."""
    if step.single_tokens:
        return [chunk.sequence.tokens[chunk.start] for chunk in step.chunks]
    ids: list[int] = []
    for chunk in step.chunks:
        sequence = chunk.sequence
        if chunk.count == 1:
            ids.append(sequence.tokens[chunk.start])
        elif chunk.num_logits > 1:
            ids += [sequence.tokens[chunk.start], *sequence.draft_tokens]
        else:
            ids += sequence.tokens[chunk.start : chunk.start + chunk.count]
    return ids
