"""Every region of a checkpoint, damaged in every way that files are damaged: refused by name, never loaded.

A checkpoint of two ranks: two shards, index, manifest and marker. Each file is flipped in its head, its middle and its
tail (for a shard: the header, both ends of every tensor), cut, emptied, lengthened, removed, and exchanged for that of
another step, of another rank and of another save of the same step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lmworks import checkpoint
from lmworks.checkpoint.format.manifest import INDEX, MANIFEST, MARKER, shard_name
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import CheckpointError

SHARDS = [shard_name(0), shard_name(1)]
FILES = [*SHARDS, INDEX, MANIFEST, MARKER]
ROWS, WIDTH = 8, 16


def whole(step: float) -> dict[str, Any]:
    """What a checkpoint of `step` holds."""
    grid = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    return {"model": {"w": grid + step}, "optim": {"w.exp_avg": (grid * step).double(), "w.step": torch.tensor(step)}}


def parallel_model(step: float) -> dict[str, Any]:
    """The same over two ranks: what has rows is cut into two parts."""
    mesh = init_device_mesh("cpu", (2,))
    half = ROWS // 2
    first = half * dist.get_rank()

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value
        return DTensor.from_local(value[first : first + half].clone(), mesh, [Shard(0)], run_check=False)

    return {section: {name: cut(value) for name, value in content.items()} for section, content in whole(step).items()}


def save_three(rank: int, root: Path, hash: str) -> None:
    """Steps 1 and 2, and in a folder beside them another save of step 2: a run that was resumed from step 1."""
    checkpoint.save(root, 1, parallel_model(1.0), {}, hash=hash)
    checkpoint.save(root, 2, parallel_model(2.0), {}, hash=hash)
    checkpoint.save(root / "other", 2, parallel_model(2.5), {}, hash=hash)


@pytest.fixture(scope="module", params=["sha256", pytest.param("xxh3", marks=pytest.mark.slow)])
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("saved")
    on_ranks(2, save_three, root, request.param)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


Damage = Callable[[Path, Path, Path], object]  # of step 2's folder, given that of step 1 and the other of step 2


def flip(name: str, position: int, bit: int) -> Damage:
    def act(new: Path, old: Path, other: Path) -> None:
        content = bytearray((new / name).read_bytes())
        content[position] ^= 1 << bit
        (new / name).write_bytes(content)

    return act


def take_from(source: str, name: str, of: str) -> Damage:
    return lambda new, old, other: shutil.copy(
        (old if of == "old" else other if of == "other" else new) / source, new / name
    )


def half_written(name: str) -> Damage:
    """A torn overwrite: the first half is of the other save, the second of this one."""

    def act(new: Path, old: Path, other: Path) -> None:
        ours, theirs = (new / name).read_bytes(), (other / name).read_bytes()
        (new / name).write_bytes(theirs[: len(ours) // 2] + ours[len(ours) // 2 :])

    return act


def regions(content: bytes, name: str) -> Iterator[int]:
    """Head, middle and tail; of a shard also the ends of its header and 32 places in between."""
    yield from {0, len(content) // 2, len(content) - 1}
    if name in SHARDS:
        data = 8 + int.from_bytes(content[:8], "little")
        yield from (7, 8, data - 1, data, *range(data, len(content), max(1, (len(content) - data) // 32)))


def damages(saved: Path) -> Iterator[tuple[str, str, Damage]]:
    for name in FILES:
        content = (saved / "step-000002" / name).read_bytes()
        for position in regions(content, name):
            yield name, f"bit of byte {position}", flip(name, position, position % 8)
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            yield name, f"cut to {size}", lambda new, old, other, n=name, s=size: os.truncate(new / n, s)
        yield name, "lengthened", lambda new, old, other, n=name: os.truncate(new / n, (new / n).stat().st_size + 1)
        yield name, "removed", lambda new, old, other, n=name: (new / n).unlink()
        yield name, "a folder", lambda new, old, other, n=name: ((new / n).unlink(), (new / n).mkdir())
        if name != INDEX:  # which is the same for every step
            yield name, "of the step before", take_from(name, name, "old")
            yield name, "of another save of this step", take_from(name, name, "other")
            yield name, "half of another save", half_written(name)
    for one, two in (SHARDS, SHARDS[::-1]):
        yield two, "of the other rank", take_from(one, two, "new")


def test_no_damage_passes_verification(saved: Path, root: Path) -> None:
    new, old, other = root / "step-000002", root / "step-000001", root / "other" / "step-000002"
    seen = set()
    for name, what, act in damages(saved):
        act(new, old, other)
        if (new / name).is_file() and (new / name).read_bytes() == (saved / new.name / name).read_bytes():
            pytest.fail(f"{name}, {what}: nothing was damaged")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.verify(new)
        said = str(caught.value)
        blamed = MANIFEST if name == MARKER and "does not match COMMITTED" in said else name
        assert str(new / blamed) in said and "\n" not in said, (name, what, said)
        if name in (*SHARDS, INDEX):
            assert f"(rank {SHARDS.index(name) if name in SHARDS else 0})" in said
        seen.add(name)
        if (new / name).is_dir():
            (new / name).rmdir()
        shutil.copy2(saved / new.name / name, new / name)
        checkpoint.verify(new)
    assert seen == set(FILES)


def load_damaged(rank: int, root: Path, saved: Path, cases: list[tuple[str, str]]) -> list[tuple[int, list[str], bool]]:
    """Each kind of damage, loaded by two ranks: the step that came, what was refused, and whether the state is that."""
    found = []
    new, old, other = root / "step-000002", root / "step-000001", root / "other" / "step-000002"
    known = {(name, what): act for name, what, act in damages(saved)}
    for name, what in cases:
        if rank == 0:
            known[name, what](new, old, other)
        dist.barrier()
        refused: list[str] = []
        state = parallel_model(0.0)
        manifest = checkpoint.load(root, state, refused=lambda folder, why: refused.append(why))  # noqa: B023
        assert manifest is not None
        right = parallel_model(float(manifest.step))
        same = all(
            torch.equal(value.to_local() if isinstance(value, DTensor) else value, whole_value)
            for section, content in state.items()
            for name, value in content.items()
            for expected in [right[section][name]]
            for whole_value in [expected.to_local() if isinstance(expected, DTensor) else expected]
        )
        found.append((manifest.step, refused, same))
        dist.barrier()
        if rank == 0:
            if (new / name).is_dir():
                (new / name).rmdir()
            shutil.copy2(saved / new.name / name, new / name)
        dist.barrier()
    return found


def test_an_index_that_is_read_otherwise_than_it_was_verified(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is failing gives other bytes the second time: those that are used must be those that were hashed."""
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        return read(path).replace(b'"F32"', b'"I32"') if path.name == INDEX and "000002" in str(path) else read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    state, refused = {"model": None}, list[str]()
    found = checkpoint.load(root, state, refused=lambda folder, why: refused.append(why))
    assert found is not None and found.step == 1
    assert len(refused) == 1 and "step-000002/index.json (rank 0) is damaged" in refused[0]


def test_ranks_that_load_it_use_the_step_before(saved: Path, root: Path) -> None:
    """Rank 1's damaged bytes are read by rank 1 alone, and rank 0 hears of it; a header, by whoever has the time."""
    kinds: dict[tuple[str, str], tuple[str, str]] = {}
    for name, what, _ in damages(saved):
        kinds.setdefault((name, what.split(" byte ")[0].split(" to ")[0]), (name, what))
    size = (saved / "step-000002" / SHARDS[1]).stat().st_size
    cases = [*kinds.values(), (SHARDS[1], f"bit of byte {size - 1}")]
    first, second = on_ranks(2, load_damaged, root, saved, cases)
    for case, (step, refused, same), (other_step, other_refused, other_same) in zip(cases, first, second, strict=True):
        assert (step, other_step, same, other_same) == (1, 1, True, True), case
        assert len(refused) == 1 and not other_refused and "step-000002" in refused[0], (case, refused)
        if case[0] in SHARDS:
            assert f"{case[0]} (rank {SHARDS.index(case[0])})" in refused[0]
