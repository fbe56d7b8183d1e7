"""A packed step against the same, written token by token."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Sequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Chunk, Step
from lmworks.engine.core.shared_prefixes import MIN_SAVED_KEYS, MIN_SHARING, PrefixFinder
from lmworks.engine.core.step_input import Batch, Layout, Packer, decode_bucket, mixed_bucket, unpack
from lmworks.engine.lora.adapters import Adapters, Slot
from lmworks.engine.lora.peft_files import Adapter
from lmworks.kernels.inference.paged_attention import SHARED_UNIT
from lmworks.spec import EngineSpec

SPEC = EngineSpec(context=160, block=4, max_seqs=16, max_batch_tokens=2000)
VOCAB = 100
GUESSES = 3


def sequence_of(draw: random.Random, slot: int) -> Sequence:
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 60))]
    answer = [draw.randrange(VOCAB) for _ in range(draw.randrange(20))]
    sequence = Sequence(Request(prompt, SamplingParams()), 0, 0, prompt + answer, len(prompt), slot=slot)
    most = -(-(len(sequence.tokens) + GUESSES) // SPEC.block)
    sequence.blocks = [draw.randrange(1000) for _ in range(most + draw.randrange(3))]
    return sequence


def chunk_of(draw: random.Random, sequence: Sequence, kind: str) -> Chunk:
    last = len(sequence.tokens) - 1
    if kind == "single":
        sequence.tokens[last] = draw.choice([PLACEHOLDER_TOKEN, 5])
        return Chunk(sequence, last, 1, 1)
    if kind == "guesses":
        sequence.draft_tokens = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, GUESSES + 1))]
        return Chunk(sequence, last, 1 + len(sequence.draft_tokens), 1 + len(sequence.draft_tokens))
    start = draw.randrange(last)
    count = draw.randrange(2, last - start + 2)
    return Chunk(sequence, start, count, int(start + count > last))


def check(batch: Batch, step: Step, bucket: Layout) -> None:
    """Every place, those that nobody took too: one token each among sequences that decode, and none behind them."""
    singles = sum(chunk.count == 1 for chunk in step.chunks)
    gap = max(bucket.num_decodes - singles, 0)
    taken: list[Chunk | None] = [*step.chunks[:singles], *[None] * gap, *step.chunks[singles:]]
    places = taken + [None] * (bucket.seqs - len(taken))
    tokens, rows, at, starts = [], [], [], [0]
    tables: list[tuple[int, list[int]]] = []
    for index, chunk in enumerate(places):
        if chunk is None:
            tokens += [(0, 0, -1)] * (index < bucket.num_decodes)
            tables.append((0, []))
        else:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            text = [*sequence.tokens, *sequence.draft_tokens]
            for place in range(chunk.start, end):
                if place >= end - chunk.num_logits:
                    at.append(len(tokens))
                    rows.append((sequence.slot, place - sequence.num_prompt_tokens + 1))
                token = VOCAB + sequence.slot if text[place] == PLACEHOLDER_TOKEN else text[place]
                block, within = sequence.blocks[place // SPEC.block], place % SPEC.block
                tokens.append((token, place, block * SPEC.block + within))
            tables.append((end, sequence.blocks[: -(-end // SPEC.block)]))
        starts.append(len(tokens))
    tokens += [(0, 0, -1)] * (bucket.tokens - len(tokens))
    rows += [(SPEC.max_seqs, 0)] * (bucket.rows - len(rows))

    assert (
        list(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)) == tokens
    )
    assert list(zip(batch.rows.tolist(), batch.output_positions.tolist(), strict=True)) == rows
    assert at == (list(range(len(at))) if batch.logits_indices is None else batch.logits_indices[: len(at)].tolist())
    first = 0
    for metadata in batch.attention_metadata:
        end = first + len(metadata.seq_lens)
        assert metadata.query_start_loc.tolist() == [start - starts[first] for start in starts[first : end + 1]]
        assert metadata.seq_lens.tolist() == [length for length, _ in tables[first:end]]
        for row, (_, blocks) in zip(metadata.block_tables.tolist(), tables[first:end], strict=True):
            assert row[: len(blocks)] == blocks
        first = end
    assert first == bucket.seqs


@pytest.mark.parametrize("kind", ["decoding", "guesses", "prompts"])
@pytest.mark.parametrize("framed", [False, True])
def test_packed_step_equals_reference(kind: str, framed: bool) -> None:
    draw = random.Random(0)
    frames = {
        "decoding": decode_bucket(8),
        "guesses": decode_bucket(8, 1 + GUESSES),
        "prompts": mixed_bucket(6, 4, 300, 128),
    }
    for _ in range(100):
        packer = Packer(SPEC, VOCAB, pinned=False)
        singles, others = draw.randrange(kind == "decoding", 5), draw.randrange(1, 4) * (kind != "decoding")
        slots = draw.sample(range(SPEC.max_seqs), singles + others)
        sequences = [sequence_of(draw, slot) for slot in slots]
        kinds = ["single"] * singles + [kind] * others
        step = Step([chunk_of(draw, *each) for each in zip(sequences, kinds, strict=True)])
        for sequence in sequences:
            packer.admit(sequence)
        for _ in range(2):
            buffer, layout = packer.pack(step, frames[kind] if framed else None)
            check(unpack(buffer, layout), step, layout)
            for sequence in sequences:
                sequence.blocks.append(draw.randrange(1000))


@pytest.mark.parametrize("framed", [False, True])
def test_each_token_has_its_sequences_adapter(framed: bool) -> None:
    """Also where padded decodes come before the prompts."""
    adapters = Adapters.__new__(Adapters)
    adapters.loaded = {name: Slot(Adapter(name, {}), row, 0) for row, name in enumerate(("a", "b"), 1)}
    row_of = {10: "a", 11: None, 12: "b", 13: "a", 14: "b"}  # by token: each sequence repeats one of its own
    packer = Packer(SPEC, VOCAB, pinned=False)
    chunks = []
    for slot, (token, name) in enumerate(row_of.items()):
        sequence = Sequence(Request([], SamplingParams(adapter=name)), 0, 0, [token] * 20, 20, slot=slot)
        sequence.blocks = list(range(8 * slot, 8 * slot + 8))
        packer.admit(sequence)
        chunks.append(Chunk(sequence, 19, 1, 1) if slot < 2 else Chunk(sequence, 0, 20 - slot, 1))
    step, bucket = Step(chunks), mixed_bucket(6, 4, 64, 32) if framed else None
    tokens = unpack(*packer.pack(step, bucket)).tokens.tolist()
    found = adapters.adapter_indices(step, bucket).tolist()
    assert len(found) == 2 + 18 + 17 + 16 + 4 * framed
    told = [(token, row) for token, row in zip(tokens, found, strict=False) if token]
    assert [adapters.rows[row_of[token]] for token, _ in told] == [row for _, row in told] and len(told) == 53


@pytest.mark.parametrize("framed", [False, True])
def test_keys_of_long_prompts_have_room(framed: bool) -> None:
    """From multiples of 128 on, prefills alone; none where no chunk is long."""
    spec = EngineSpec(context=4096, block=16, max_seqs=8)
    packer = Packer(spec, VOCAB, pinned=False, gathers=True)
    sequences = [
        Sequence(Request([0], SamplingParams()), 0, 0, [0] * length, length, slot=slot, blocks=list(range(256)))
        for slot, length in enumerate((40, 1400, 700, 2000))
    ]
    chunks = [Chunk(sequences[0], 39, 1, 1), *(Chunk(each, 300, len(each.tokens) - 300, 1) for each in sequences[1:])]
    for each in sequences:
        packer.admit(each)
    bucket = mixed_bucket(2, 4, 4096, 2048, 256, 8192) if framed else None
    *_, metadata = unpack(*packer.pack(Step(chunks), bucket)).attention_metadata
    assert metadata.key_starts is not None
    assert metadata.key_starts.tolist() == [0, 1408, 2176, 4224, *[4224] * framed]
    assert metadata.keys == (8192 if framed else 4224)
    short = Step([chunks[0], Chunk(sequences[1], 0, 1000, 0)])
    assert all(one.key_starts is None for one in unpack(*packer.pack(short)).attention_metadata)
    assert Packer(spec, VOCAB, pinned=False).pack(Step(chunks))[1].keys == 0


def decoding(tables: list[list[int]], size: int) -> Step:
    """Sequences that decode, with these blocks."""
    chunks = []
    for slot, blocks in enumerate(tables):
        sequence = Sequence(Request([0], SamplingParams()), 0, 0, [0] * (len(blocks) * size), 1, slot=slot)
        sequence.blocks = blocks
        chunks.append(Chunk(sequence, len(sequence.tokens) - 1, 1, 1))
    return Step(chunks)


@pytest.mark.parametrize("sharing", [4, 16])
def test_shared_prefixes_of_a_step(sharing: int) -> None:
    """Every sequence in one tile at most, whose sequences have all blocks of the prefix in common, and no more."""
    draw, size = random.Random(0), 16
    spec = EngineSpec(context=16384, block=size, max_seqs=64)
    numbers, seen = iter(range(10**6)), set[int]()
    for _ in range(20):
        tables = []
        for _ in range(draw.randrange(1, 5)):
            prefix = [next(numbers) for _ in range(draw.randrange(1, 300))]
            for _ in range(draw.choice([1, 3, 4, 5, 12])):
                tables.append(prefix + [next(numbers) for _ in range(draw.randrange(1, 9))])
        draw.shuffle(tables)
        packer, step = Packer(spec, VOCAB, pinned=False, sharing=sharing), decoding(tables, size)
        for chunk in step.chunks:
            packer.admit(chunk.sequence)
        bucket = decode_bucket(64)
        [metadata] = unpack(*packer.pack(step, bucket)).attention_metadata
        kept = {sum(row[0] == other[0] for other in tables) >= MIN_SHARING for row in tables}
        if metadata.shared is None:
            assert kept == {False} or sum(size * len(row) for row in tables) < 2 * MIN_SAVED_KEYS
            continue
        shared = metadata.shared
        lengths, members, starts = shared.lengths.tolist(), shared.members.tolist(), shared.tile_starts.tolist()
        assert len(lengths) == len(members) == bucket.seqs and len(starts) == packer.prefixes.max_tiles(64) + 1
        assert sorted(members[: starts[-1]]) == [row for row, length in enumerate(lengths) if length]
        for begin, end in itertools.pairwise(starts):
            assert 0 <= end - begin <= sharing
            tile = [tables[row] for row in members[begin:end]]
            for row in members[begin:end]:
                blocks = lengths[row] // size
                assert lengths[row] % SHARED_UNIT == 0 and tables[row][:blocks] == tile[0][:blocks]
                alike = [other for other in tables if other[0] == tables[row][0]]
                common = next(i for i, column in enumerate(zip(*alike, strict=False)) if len({*column}) > 1)
                assert 0 <= common * size - lengths[row] < SHARED_UNIT
                seen.add(lengths[row])
    assert len(seen) > 5


def test_shared_prefixes_are_searched_again_when_sequences_change(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, prefix = EngineSpec(context=16384, block=16, max_seqs=8), list(range(800))
    packer = Packer(spec, VOCAB, pinned=False, sharing=16)
    step = decoding([[*prefix, 1000 + row] for row in range(6)], 16)
    found = []
    search = PrefixFinder.search
    monkeypatch.setattr(PrefixFinder, "search", lambda *args: found.append(search(*args)) or found[-1])
    for chunk in step.chunks:
        packer.admit(chunk.sequence)
    for chunks in (step.chunks, step.chunks, step.chunks[:5], step.chunks[:5]):
        packer.pack(Step(chunks))
    assert [np.unique(one.lengths).tolist() for one in found] == [[12800]] * 2
    packer.admit(step.chunks[0].sequence)
    step.chunks[0].sequence.blocks = list(range(2000, 2801))
    [metadata] = unpack(*packer.pack(Step(step.chunks[:5]))).attention_metadata
    assert metadata.shared is not None and metadata.shared.lengths.tolist() == [0, *[12800] * 4]
    assert packer.pack(Step(step.chunks[:3]))[1].shared_tiles == 0
    assert Packer(spec, VOCAB, pinned=False).pack(step)[1].shared_tiles == 0
