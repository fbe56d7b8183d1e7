"""Statistics of a prepared folder: sizes, lengths, frequencies, repetition, sample texts, and the loss of a bigram
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .index import Index
from .order import GOLDEN, mix
from .store import TokenData
from .tokenizer import Tokenizer, load_tokenizer

QUANTILES = (0, 10, 50, 90, 99, 100)
SPAN = 32  # tokens; as long as this, a passage that comes again was copied. A power of two: see span_hashes
SPAN_SAMPLE = 4 * 2**20  # tokens at the head of a split that are searched for such passages
SAMPLE_TOKENS = 256


@dataclass(frozen=True)
class TokenCount:
    id: int
    text: str
    count: int
    share: float


@dataclass(frozen=True)
class SplitSurvey:
    shards: int
    documents: int
    tokens: int
    file_bytes: int
    text_bytes: int
    bytes_per_token: float
    document_tokens: dict[str, int]  # quantiles of the length, "p50": …
    entropy_bits: float  # of single tokens: what a model that knows only frequencies needs for one
    used_vocab: int
    top_tokens: tuple[TokenCount, ...]
    duplicate_documents: int
    repeated_spans: float  # share of 32-token passages that came before in this split


@dataclass(frozen=True)
class Survey:
    folder: str
    sources: tuple[str, ...]
    tokenizer: str
    vocab_size: int
    dtype: str
    dropped: dict[str, int]
    splits: dict[str, SplitSurvey]
    shared_documents: int | None  # in train and validation both; None without a validation split
    val_spans_in_train: float | None  # share of the validation split's 32-token passages that train has too
    samples: tuple[str, ...]


def survey(folder: Path, samples: int = 3, top: int = 10) -> Survey:
    """Checks every shard against its checksum first: figures about damaged data would mislead."""
    index, tokenizer = TokenData.open(folder, "train", verify=False).index, load_tokenizer(folder)
    data = {split: TokenData.open(folder, split, verify=True) for split in index.splits}
    documents = {split: document_digests(tokens) for split, tokens in data.items()}
    spans = {split: span_hashes(tokens.read(0, min(len(tokens), SPAN_SAMPLE))) for split, tokens in data.items()}
    both = "val" in data
    return Survey(
        folder=str(folder),
        sources=index.sources,
        tokenizer=index.tokenizer,
        vocab_size=index.vocab_size,
        dtype=index.dtype,
        dropped=index.dropped,
        splits={s: survey_split(data[s], documents[s], spans[s], index, tokenizer, top) for s in data},
        shared_documents=len(set(documents["train"]) & set(documents["val"])) if both else None,
        val_spans_in_train=share_found(spans["val"], spans["train"]) if both else None,
        samples=tuple(sample_texts(data["train"], tokenizer, samples)),
    )


def survey_split(
    data: TokenData, documents: list[int], spans: NDArray[np.uint64], index: Index, tokenizer: Tokenizer, top: int
) -> SplitSurvey:
    counts = np.zeros(index.vocab_size, np.int64)
    for chunk in data.chunks():
        counts += np.bincount(chunk, minlength=index.vocab_size)
    shares = counts[counts > 0] / len(data)
    text_bytes = sum(shard.text_bytes for shard in data.shards)
    lengths = data.document_lengths()
    return SplitSurvey(
        shards=len(data.shards),
        documents=data.documents,
        tokens=len(data),
        file_bytes=sum(shard.bytes for shard in data.shards),
        text_bytes=text_bytes,
        # end-of-text has no text
        bytes_per_token=text_bytes / max(1, len(data) - data.documents),
        document_tokens={f"p{q}": int(np.percentile(lengths, q, method="nearest")) for q in QUANTILES},
        entropy_bits=float(-(shares * np.log2(shares)).sum()),
        used_vocab=len(shares),
        top_tokens=tuple(
            TokenCount(int(i), token_text(tokenizer, int(i)), int(counts[i]), float(counts[i] / len(data)))
            for i in np.argsort(-counts, kind="stable")[:top]
            if counts[i]
        ),
        duplicate_documents=len(documents) - len(set(documents)),
        repeated_spans=float((spans[1:] == spans[:-1]).sum() / max(1, len(spans))),
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return "end of text" if token == tokenizer.eot else tokenizer.decode([token])


def document_digests(data: TokenData) -> list[int]:
    ends = np.cumsum(data.document_lengths())
    return [hash(data.read(a, b).tobytes()) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def span_hashes(tokens: NDArray[np.generic]) -> NDArray[np.uint64]:
    """A hash of every passage of SPAN tokens, sorted: one of 2, 4, 8 … tokens is made of two of half as many."""
    if len(tokens) < SPAN:
        return np.empty(0, np.uint64)
    hashes = mix(tokens.astype(np.uint64) + GOLDEN)
    for step in range(int(math.log2(SPAN))):
        half = 1 << step
        hashes = mix(hashes[:-half] * GOLDEN + hashes[half:])
    return np.sort(hashes)


def share_found(wanted: NDArray[np.uint64], known: NDArray[np.uint64]) -> float:
    """How many of `wanted` are in `known`, as a share; both are sorted."""
    if not len(wanted) or not len(known):
        return 0.0
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return float((known[places] == wanted).mean())


def sample_texts(data: TokenData, tokenizer: Tokenizer, count: int) -> Iterable[str]:
    """The heads of documents, evenly spaced over the split."""
    ends = np.cumsum(data.document_lengths())
    count = min(count, len(ends))
    for number in range(count):
        document = (2 * number + 1) * len(ends) // (2 * count)
        start = int(ends[document - 1]) if document else 0
        # - 1: without its end-of-text
        yield tokenizer.decode(data.read(start, min(start + SAMPLE_TOKENS, int(ends[document]) - 1)).tolist())


# --- bigram model ----------------------------------------------------------------------------------------


def bigram_loss(train: TokenData, val: TokenData, vocab_size: int) -> float:
    """Nats per token of `val` under a Witten–Bell smoothed bigram model of `train`.

    P(b | a) = (c(a, b) + t(a) · P(b)) / (c(a) + t(a)), with t(a) the number of different successors of a: a token
    that was seen with many leaves more room for others. P(b) = (c(b) + 1) / (n + vocab_size).
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for keys in pair_keys(train, vocab_size):
        pairs, counts = add_counts(pairs, counts, keys)
    first = pairs // vocab_size
    total = np.bincount(first, counts, minlength=vocab_size)  # c(a)
    kinds = np.bincount(first, minlength=vocab_size)  # t(a)
    unigram = np.bincount(pairs % vocab_size, counts, minlength=vocab_size) + 1.0
    unigram /= unigram.sum()

    loss, n = 0.0, 0
    for keys in pair_keys(val, vocab_size):
        a, b = keys // vocab_size, keys % vocab_size
        place = np.minimum(np.searchsorted(pairs, keys), len(pairs) - 1)
        seen = np.where(pairs[place] == keys, counts[place], 0)
        # A token that never came before anything in train leaves nothing but P(b).
        room = np.maximum(kinds[a], 1)
        loss -= float(np.log((seen + room * unigram[b]) / (total[a] + room)).sum())
        n += len(keys)
    return loss / n


def pair_keys(data: TokenData, vocab_size: int) -> Iterator[NDArray[np.int64]]:
    """(a, b) of every two neighbours as the number a · vocab_size + b, a piece at a time."""
    last = np.empty(0, np.int64)
    for chunk in data.chunks():
        tokens = np.concatenate([last, chunk.astype(np.int64)])
        yield tokens[:-1] * vocab_size + tokens[1:]
        last = tokens[-1:]


def add_counts(
    pairs: NDArray[np.int64], counts: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted pairs and how often each was seen, with `keys` counted in: sparse, so any vocabulary will do."""
    new, new_counts = np.unique(keys, return_counts=True)
    merged, places = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    sums = np.bincount(places, np.concatenate([counts, new_counts]))
    return merged, sums.astype(np.int64)
