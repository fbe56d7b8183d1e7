"""Published layouts among all that the search prices (`validation/rank_layouts.py`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmworks.plan.memory.sheet import budget
from lmworks.plan.search.candidates import cases
from lmworks.plan.search.search import search
from lmworks.plan.step.price import price
from lmworks.spec import LMWorksError
from lmworks_validation.layouts import Configuration, Priced, Ranked, configurations, least_bytes

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "published_layouts.json"
LAYOUT = ("tp", "zero", "dp_shard", "dp_replicate", "recompute", "micro_batch")


def small() -> Configuration:
    """7B on 8 GPUs, without pipelines and rings."""
    found = configurations()[0]
    asked = tuple(replace(one, pinned={**one.pinned, "pp": 1, "cp": 1}) for one in found.problems)
    return replace(found, problems=asked)


@pytest.fixture(scope="module")
def priced() -> Priced:
    return Priced.of(small().problems)


def test_shapes_are_the_published_ones() -> None:
    """Weights in billions, GPUs, tokens of a step, and what was measured in tokens/s of a GPU."""
    found = {
        one.label: (round(one.problems[0].model.params / 1e9, 1), one.problems[0].seq * one.problems[0].global_batch)
        for one in configurations()
    }
    assert found == {
        "MPT 7B, 8 × H100": (6.7, 98_304),
        "Llama 3 70B, 64 × H100": (70.6, 1_048_576),
        "Llama 3.1 405B, 512 × H100": (405.9, 2_097_152),
        "Llama 3.1 405B, 16384 × H100": (405.9, 16_777_216),
        "GPT-3 175B, 64 × A100": (174.6, 131_072),
        "MT-NLG 530B, 280 × A100": (529.6, 573_440),
        "GPT 1T, 512 × A100": (1008.0, 1_048_576),
        "BLOOM 176B, 384 × A100": (176.2, 4_194_304),
        "Mixtral 8x7B, 64 × H100": (46.7, 1_048_576),
        "DeepSeek-V3, 2048 × H800": (671.0, 62_914_560),
    }
    measured = [one.measured for one in configurations()]
    # 13.75 s of 64 × 2,048 tokens on 64 GPUs; 41 % of 989 TFLOP/s at 2.52 TFLOP a token.
    assert measured[4] == pytest.approx(2048 / 13.75)
    assert measured[3] == pytest.approx(160.7, abs=0.1)
    assert measured[8] is None


def test_the_first_is_what_the_search_finds(priced: Priced) -> None:
    best = search(small().problems).front[0]
    assert priced[0].case.text == best.case.text
    assert priced[0].step_s == pytest.approx(best.step_s)
    assert (np.diff(priced.seconds) >= 0).all()


def test_the_rank_counts_faster_layouts_once(priced: Priced) -> None:
    """One by one: candidates that fit and are faster; two formats of weights are one layout."""
    stated = {"tp": 1, "zero": 3, "dp_shard": 8, "recompute": "selective", "micro_batch": 3}
    ranked = Ranked.of(priced, stated)
    own = ranked.published.step_s
    faster, degrees = set(), {}
    for problem in small().problems:
        for words, case in cases(problem):
            fits = np.flatnonzero(np.asarray(budget(case).reserved) <= problem.safe_bytes)
            seconds = np.broadcast_to(price(case).seconds, np.shape(case.tp))
            for row in fits:
                keys = {**{name: getattr(case, name) for name in LAYOUT if hasattr(case, name)}, **vars(words)}
                layout = tuple(v[row] if isinstance(v, np.ndarray) else v for v in keys.values())
                tp = int(case.tp[row])
                degrees[tp] = min(degrees.get(tp, np.inf), seconds[row])
                if seconds[row] < own:
                    faster.add(layout)
    assert ranked.rank == 1 + len(faster) > 1
    assert ranked.rank_of_degrees == 1 + sum(seconds < degrees[1] for seconds in degrees.values())
    assert [layout.keys["tp"] for layout in ranked.best_degrees] == sorted(degrees, key=lambda tp: degrees[tp])
    assert ranked.near == (priced.seconds <= 1.02 * priced.seconds[0]).sum()
    assert ranked.inside_interval == (own <= float(price(ranked.best.case).interval[1]))


def test_the_published_layout_of_7b_is_the_fastest(priced: Priced) -> None:
    configuration = small()
    ranked = Ranked.of(priced, configuration.published)
    assert (ranked.rank, ranked.rank_of_degrees, ranked.behind, ranked.recomputes) == (1, 1, 0.0, False)
    assert ranked.published.case.text == "dp=8 ZeRO-3, micro-batch 6, bf16 weights"
    assert ranked.published.tokens_per_s_gpu == pytest.approx(configuration.measured, rel=0.15)
    assert least_bytes(configuration) == pytest.approx(float(budget(ranked.published.case).reserved), rel=1e-9)


def test_one_change_leaves_everything_else(priced: Priced) -> None:
    ranked = Ranked.of(priced, {"tp": 1, "zero": 3, "dp_shard": 8, "recompute": "full", "micro_batch": 3})
    changes = ranked.single_changes()
    own = ranked.published.keys
    assert changes.keys() == {"recompute", "micro-batch"}
    assert {**changes["micro-batch"].keys, "micro_batch": 3} == own
    assert {**changes["recompute"].keys, "recompute": "full"} == own
    assert changes["recompute"].step_s < ranked.published.step_s


def test_what_does_not_fit_as_published_may_compute_more_again(priced: Priced) -> None:
    stated = {"tp": 1, "zero": 0, "recompute": "none"}  # 14 bytes of 6.7 billion weights are more than 80 GB
    with pytest.raises(LMWorksError, match="is legal and fits"):
        Ranked.of(priced, stated)
    stated = {"tp": 1, "zero": 1, "dp_shard": 8, "micro_batch": 6}
    assert not len(priced.agreeing({**stated, "recompute": "none"}))
    ranked = Ranked.of(priced, {**stated, "recompute": "none"})
    assert ranked.recomputes
    assert ranked.published.keys["recompute"] == "selective"


@pytest.mark.slow
@pytest.mark.parametrize("index", range(10))
def test_published_layouts_are_where_the_page_says(index: int) -> None:
    """The figures of docs/planning.md are those of the planner as it is."""
    row, configuration = json.loads(RESULT.read_text())["configurations"][index], configurations()[index]
    ranked = Ranked.of(Priced.of(configuration.problems), configuration.published)
    assert row["configuration"] == configuration.label
    assert (ranked.rank, ranked.rank_of_degrees) == (row["rank"], row["rank_of_degrees"])
    assert ranked.best.case.text == row["five_best"][0]["layout"]
    assert ranked.behind == pytest.approx(row["behind"], abs=1e-4)
