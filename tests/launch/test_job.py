"""Ranks over machines: what fits, what follows from what, and one line for what does not fit."""

from __future__ import annotations

import pytest

from lmworks.launch import Job
from lmworks.spec import RunSpec, SpecError, load_run


def tiny(*overrides: str) -> RunSpec:
    return load_run("tiny", overrides)


def test_machines_of_the_spec() -> None:
    job = Job.of(tiny("parallel.dp=8", "cluster.nodes=2", "cluster.gpus_per_node=4"), "tiny")
    assert (job.nodes, job.per_node, job.overrides) == (2, 4, ())


@pytest.mark.parametrize(
    ("nodes", "per_node", "expected"), [(2, None, (2, 4)), (None, 2, (4, 2)), (8, 1, (8, 1)), (1, 8, (1, 8))]
)
def test_options_win_and_the_job_says_so(nodes: int | None, per_node: int | None, expected: tuple[int, int]) -> None:
    job = Job.of(tiny("parallel.dp=8"), "tiny", ("parallel.dp=8",), nodes=nodes, per_node=per_node)
    assert (job.nodes, job.per_node) == expected
    told = load_run("tiny", job.overrides)  # what the ranks will read
    assert told.cluster == job.spec.cluster
    assert told.parallel.world == 8


@pytest.mark.parametrize(
    ("nodes", "per_node", "words"),
    [
        (None, None, "6 ranks (pp × dp × cp × tp), but cluster.nodes × cluster.gpus_per_node = 1 × 1 = 1"),
        (4, None, "6 ranks (pp × dp × cp × tp), but --nodes × --gpus-per-node = 4 × 1 = 4"),
        (2, 8, "--nodes × --gpus-per-node = 2 × 8 = 16"),
        (7, None, "--nodes × --gpus-per-node = 7 × 0 = 0"),
    ],
)
def test_a_mismatch_names_both_and_what_fits(nodes: int | None, per_node: int | None, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        Job.of(tiny("parallel.dp=3", "parallel.tp=2"), "tiny", nodes=nodes, per_node=per_node)
    assert words in str(refused.value)
    assert "--nodes 3 --gpus-per-node 2 | --nodes 6 --gpus-per-node 1" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_fits_is_listed_for_the_usual_machines() -> None:
    with pytest.raises(SpecError) as refused:
        Job.of(tiny("parallel.dp=24"), "tiny", nodes=5)
    assert str(refused.value).endswith(
        "these would fit: --nodes 3 --gpus-per-node 8 | --nodes 6 --gpus-per-node 4 | "
        "--nodes 12 --gpus-per-node 2 | --nodes 24 --gpus-per-node 1"
    )


@pytest.mark.parametrize(
    ("name", "label"), [("Llama 3.1 8B", "llama-3-1-8b"), ("7b", "run-7b"), ("ü", "run"), ("x" * 80, "x" * 40)]
)
def test_a_name_becomes_a_label(name: str, label: str) -> None:
    assert Job.of(tiny().replace(name=name), "tiny").label == label
