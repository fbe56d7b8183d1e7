from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import SMALL_PARTS, make_corpus, stored_documents

from lmworks.data import Batch, Batches, prepare
from lmworks.spec import DataError, DataSpec, SpecError

SEQ = 16


def spec(folder: Path, **changes: object) -> DataSpec:
    return DataSpec(path=str(folder), seq=SEQ, micro_batch=2, global_batch=8, **changes)


def flat(folder: Path, split: str = "train") -> list[int]:
    return [token for document in stored_documents(folder, split) for token in [*document, 256]]


def windows(folder: Path, split: str = "train") -> list[tuple[int, ...]]:
    tokens = flat(folder, split)
    return [tuple(tokens[i : i + SEQ + 1]) for i in range(0, len(tokens) - SEQ, SEQ)]


def rows(step: list[Batch]) -> list[tuple[int, ...]]:
    """Each row with its last target: the window it was cut from."""
    return [(*t, y[-1]) for batch in step for t, y in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.tokens, y.tokens)
        and torch.equal(x.targets, y.targets)
        and (x.documents is None) == (y.documents is None)
        and (x.documents is None or torch.equal(x.documents, y.documents))
        for x, y in zip(a, b, strict=True)
    )


def test_shapes_and_types(prepared: Path) -> None:
    step = Batches(spec(prepared), seed=0).at(0)
    assert len(step) == 4
    assert all(b.tokens.shape == b.targets.shape == (2, SEQ) for b in step)
    assert all(b.tokens.dtype == b.targets.dtype == torch.int64 for b in step)
    assert all(torch.equal(b.tokens[:, 1:], b.targets[:, :-1]) for b in step)
    assert step[0].documents is None


@pytest.mark.parametrize("world", [2, 4])
def test_first_50_batches_do_not_depend_on_ranks(prepared: Path, world: int) -> None:
    data = spec(prepared, document_mask=True)
    alone = Batches(data, seed=7)
    ranks = [Batches(data, seed=7, rank=rank, world=world) for rank in range(world)]
    for cursor in range(50):
        assert same(alone.at(cursor), [batch for rank in ranks for batch in rank.at(cursor)])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose
def test_first_50_batches_do_not_depend_on_workers(prepared: Path) -> None:
    batches = Batches(spec(prepared, document_mask=True), seed=7)
    expected = [batches.at(cursor) for cursor in range(50)]
    for workers in range(5):
        streamed = list(batches.stream(0, 50, workers))
        assert len(streamed) == 50
        assert all(same(a, b) for a, b in zip(expected, streamed, strict=True)), workers


def test_prefetching_does_not_use_global_generator(prepared: Path) -> None:
    """Else dropout would depend on the number of workers and on where a run was resumed."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Batches(spec(prepared), seed=0).stream(0, 2, workers=1))
    assert torch.equal(before, torch.get_rng_state())


def test_epoch_has_every_window_once(prepared: Path) -> None:
    """Through three epochs that end in the middle of a batch."""
    batches, expected = Batches(spec(prepared), seed=1), windows(prepared)
    assert batches.windows == len(expected)
    assert len(expected) % 8
    served = [row for cursor in range(3 * len(expected) // 8 + 1) for row in rows(batches.at(cursor))]
    epochs = [served[i * len(expected) : (i + 1) * len(expected)] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(expected)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != expected


def test_resume_at_any_cursor_equals_uninterrupted_stream(prepared: Path) -> None:
    whole = list(Batches(spec(prepared), seed=3).stream(0, 60))
    for cursor in (1, 13, 37, 59):
        resumed = list(Batches(spec(prepared), seed=3).stream(cursor, 60, workers=cursor % 2))
        assert all(same(a, b) for a, b in zip(whole[cursor:], resumed, strict=True))


def test_seed_changes_order(prepared: Path) -> None:
    assert rows(Batches(spec(prepared), seed=1).at(0)) != rows(Batches(spec(prepared), seed=2).at(0))


def test_without_shuffle_windows_are_in_storage_order(prepared: Path) -> None:
    """Over shard boundaries too: the corpus is stored in several."""
    expected = windows(prepared, "val")
    val = Batches(spec(prepared).replace(global_batch=2), seed=0, split="val", shuffle=False)
    assert val.windows == len(expected)
    served = [row for cursor in range(val.windows // 2) for row in rows(val.at(cursor))]
    assert served == expected[: len(served)]
    unshuffled = Batches(spec(prepared, shuffle=False), seed=0)
    assert [r for c in range(unshuffled.windows // 8) for r in rows(unshuffled.at(c))] == windows(prepared)[
        : unshuffled.windows // 8 * 8
    ]


def test_default_global_batch_is_one_micro_batch_per_rank(prepared: Path) -> None:
    data = spec(prepared).replace(global_batch=0)
    assert [len(Batches(data, seed=0, rank=r, world=3).at(0)) for r in range(3)] == [1, 1, 1]


def reference_mask(window: list[int], starts: list[bool]) -> tuple[list[int], list[int]]:
    """Targets and documents of one window, token by token. starts[i]: token i is the first of its document."""
    targets, documents, document = [], [], 0
    for i in range(SEQ):
        if i and starts[i]:
            document += 1
        documents.append(document)
        targets.append(-100 if starts[i + 1] else window[i + 1])
    return targets, documents


def test_document_mask_equals_reference(tmp_path: Path) -> None:
    """Documents shorter and longer than a window, and one that begins exactly where a window does."""
    source = tmp_path / "source"
    source.mkdir()
    for number, length in enumerate([3, 11, 1, 1, 40, 7, 15, 16, 17, 30, 2, 33]):
        (source / f"{number:02d}.txt").write_text(chr(97 + number) * length)
    prepare([str(source)], tmp_path / "out", val_fraction=0, workers=1, shard_tokens=25)
    tokens = flat(tmp_path / "out")
    first = [i == 0 or tokens[i - 1] == 256 for i in range(len(tokens))]
    batches = Batches(
        DataSpec(path=str(tmp_path / "out"), seq=SEQ, micro_batch=1, document_mask=True, shuffle=False), seed=0
    )
    assert batches.windows == (len(tokens) - 1) // SEQ
    inner_starts = 0
    for window in range(batches.windows):
        at = window * SEQ
        (batch,) = batches.at(window)
        targets, documents = reference_mask(tokens[at : at + SEQ + 1], first[at : at + SEQ + 1])
        assert batch.tokens.tolist() == [tokens[at : at + SEQ]]
        assert batch.targets.tolist() == [targets]
        assert batch.documents is not None
        assert batch.documents.tolist() == [documents]
        inner_starts += sum(first[at + 1 : at + SEQ])
    assert inner_starts > 5
    assert any(first[at] for at in range(SEQ, len(tokens), SEQ))


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two corpora whose tokens tell them apart: the second is upper case."""
    root = tmp_path_factory.mktemp("mix")
    for name, documents in (("lower", 40), ("upper", 6)):
        make_corpus(root / name, documents)
        for path in (root / name).rglob("*.py"):
            path.write_text("A" * (90 + int(path.stem)) if name == "upper" else "a" * 80 + path.stem)
        prepare([str(root / name)], root / f"{name}-out", val_fraction=0, workers=1, reading=SMALL_PARTS)
    return root / "lower-out", root / "upper-out"


def test_mixture_proportions_and_epochs_per_source(two_sources: tuple[Path, Path]) -> None:
    lower, upper = two_sources
    data = DataSpec(mix={str(lower): 0.75, str(upper): 0.25}, seq=SEQ, micro_batch=4, global_batch=8)
    batches = Batches(data, seed=0)
    assert batches.windows == len(windows(lower)) + len(windows(upper))
    served: dict[str, list[tuple[int, ...]]] = {"lower": [], "upper": []}
    for cursor in range(60):
        step = rows(batches.at(cursor))
        from_upper = [row for row in step if ord("A") in row]
        assert len(from_upper) == 2  # 0.25 of 8, in every batch
        served["upper"] += from_upper
        served["lower"] += [row for row in step if ord("A") not in row]
    for name, folder in (("lower", lower), ("upper", upper)):
        once = sorted(windows(folder))
        assert sorted(served[name][: len(once)]) == once


def test_mixture_does_not_depend_on_ranks(two_sources: tuple[Path, Path]) -> None:
    lower, upper = two_sources
    data = DataSpec(mix={str(lower): 0.7, str(upper): 0.3}, seq=SEQ, micro_batch=1, global_batch=4)
    alone = Batches(data, seed=5)
    ranks = [Batches(data, seed=5, rank=rank, world=4) for rank in range(4)]
    for cursor in range(25):
        assert same(alone.at(cursor), [batch for rank in ranks for batch in rank.at(cursor)])


def test_mixture_sources_must_share_tokenizer(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "bpe", "bpe:300", workers=1)
    data = DataSpec(mix={str(prepared): 1.0, str(tmp_path / "bpe"): 1.0}, seq=SEQ, micro_batch=1)
    with pytest.raises(DataError, match=r"data\.mix: .* has the tokenizer bytes and .*bpe another one, bpe:300"):
        Batches(data, seed=0)


def test_source_shorter_than_window_is_rejected_with_its_length(prepared: Path) -> None:
    total = len(flat(prepared))
    with pytest.raises(DataError, match=rf"the train split has {total} tokens.*data\.seq of at most {total - 1}"):
        Batches(spec(prepared).replace(seq=total), seed=0)
    assert Batches(spec(prepared).replace(seq=total - 1), seed=0).windows == 1


def test_indivisible_global_batch_is_rejected(prepared: Path) -> None:
    with pytest.raises(
        SpecError, match=r"data\.global_batch = 8 is not divisible by data\.micro_batch × ranks = 2 × 3"
    ):
        Batches(spec(prepared), seed=0, world=3)


def test_damaged_shard_is_rejected_before_first_batch(prepared: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(prepared, tmp_path / "copy"))
    raw = bytearray((folder / "train-00001.bin").read_bytes())
    raw[7] ^= 1
    (folder / "train-00001.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00001\.bin is damaged"):
        Batches(spec(folder), seed=0)
    Batches(spec(folder, verify=False), seed=0)


def test_batches_properties(prepared: Path) -> None:
    batches = Batches(spec(prepared), seed=0)
    assert batches.vocab_size == 257
    assert batches.tokenizer.decode(batches.tokenizer.encode("é")) == "é"
    assert batches.digest == Batches(spec(prepared), seed=9).digest
    assert np.max([b.tokens.max() for b in batches.at(0)]) < batches.vocab_size
