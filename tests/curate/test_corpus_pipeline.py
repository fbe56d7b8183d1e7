"""Stages that look at a whole corpus, in one pipeline: the same bytes for any number of workers and after kill -9."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_dedup import corpus, first_of_components

from lmworks.curate.curate import curate
from lmworks.curate.pipeline import Pipeline

ITEM = "the quick brown fox jumps over the lazy dog and runs away into the dark forest"
MAIL = "please write to jane.doe@lmworks.dev about this matter of some importance"


def written(folder: Path) -> Path:
    """Near-duplicates, equal documents, a repeated line, a leak and an address."""
    draw = random.Random(8)
    texts = corpus(draw)
    texts += [f"{text}\n{MAIL} {at}" for at, text in enumerate(draw.sample(texts[:40], 3))]
    texts += [texts[3], f"{' '.join(draw.sample(texts[5].split(), 50))} {ITEM}", f"{texts[7]} \n\n"]
    draw.shuffle(texts)
    (folder / "suite.txt").write_text(ITEM)
    path = folder / "raw.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def pipeline(source: Path, out: Path, part_bytes: int = 30_000) -> Pipeline:
    suite = str(source.parent / "suite.txt")
    stages = ["exact", "pii", {"stage": "decontaminate", "against": [suite]}, "lines", "minhash"]
    return Pipeline.from_dict(
        {"sources": [str(source)], "out": str(out), "stages": stages, "reading": {"part_bytes": part_bytes}}
    )


def shards(out: Path) -> bytes:
    files = sorted(path for path in out.glob("*.jsonl") if path.is_file())
    assert files
    return b"".join(path.read_bytes() for path in files)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("corpus")
    source = written(folder)
    curate(pipeline(source, folder / "whole"), workers=1)
    return source, shards(folder / "whole")


def test_every_stage_does_its_part(expected: tuple[Path, bytes], tmp_path: Path) -> None:
    source, _ = expected
    done = curate(pipeline(source, tmp_path / "out", part_bytes=10**6), workers=1)
    summary = done.summary()
    assert summary["dropped"]["exact_duplicate"] == 3  # "short", a copy, and one with blank lines after it
    assert summary["dropped"]["contaminated"] == 1
    assert summary["dropped"]["near_duplicate"] > 10
    kept = [json.loads(line)["text"] for line in shards(tmp_path / "out").splitlines()]
    assert not any("jane.doe" in text for text in kept)
    assert kept == first_of_components(kept, 0.8)


@pytest.mark.parametrize(("workers", "part_bytes"), [(4, 30_000), (1, 12_000), (1, 10**6)])
def test_workers_and_parts_change_nothing(
    expected: tuple[Path, bytes], tmp_path: Path, workers: int, part_bytes: int
) -> None:
    source, whole = expected
    curate(pipeline(source, tmp_path / "out", part_bytes), workers=workers)
    assert shards(tmp_path / "out") == whole


KILLED = """
import os, signal, sys
from pathlib import Path
source, out, stage, count, here = sys.argv[1:]
sys.path.insert(0, here)
from test_corpus_pipeline import pipeline
from lmworks.curate.curate import curate
def progress(name, done, total):
    if name == stage and done >= int(count):
        os.kill(os.getpid(), signal.SIGKILL)
curate(pipeline(Path(source), Path(out)), workers=1, progress=progress)
"""


@pytest.mark.parametrize(
    ("stage", "count"),
    [
        ("merge minhash", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("merge exact", 3), ("merge lines", 8))),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    expected: tuple[Path, bytes], tmp_path: Path, stage: str, count: int, forked_python: None
) -> None:
    source, whole = expected
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), stage, str(count)]
    ended = subprocess.run([*command, str(Path(__file__).parent)], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    curate(pipeline(source, tmp_path / "out"), workers=1)
    assert shards(tmp_path / "out") == whole
