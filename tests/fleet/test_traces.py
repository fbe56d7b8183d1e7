"""Public trace formats (excerpts of our own making in the published columns) and generated arrivals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from lmworks.fleet.generate import BURST_CV, Traffic, generate
from lmworks.fleet.trace import Arrival, read_trace
from lmworks.spec import SpecError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.001163+00:00,2162,5
2024-05-12 00:00:00.501163+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURST_GPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
10.5,abc,3.1,GPT-4,100,20,120,Conversation log
11.5,,1.0,ChatGPT,50,10,60,API log
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (AZURE, [(0.0, 374, 44), (4.314579, 396, 109), (60.0, 879, 55)]),
        (AZURE_2024, [(0.0, 2162, 5), (0.5, 2399, 6)]),
        (BURST_GPT, [(0.0, 472, 18), (40.0, 1087, 230)]),  # the call that failed is left out
        (BURST_GPT_2, [(0.0, 100, 20), (1.0, 50, 10)]),
        (MOONCAKE, [(0.0, 6758, 500), (0.052, 7322, 490)]),
    ],
)
def test_formats(text: str, wanted: list[tuple[float, int, int]], tmp_path: Path) -> None:
    (path := tmp_path / "trace").write_text(text)
    found = read_trace(path)
    assert [(one.prompt, one.answer) for one in found.arrivals] == [one[1:] for one in wanted]
    assert [one.at for one in found.arrivals] == pytest.approx([one[0] for one in wanted], abs=1e-6)
    assert [one.prefix for one in found.arrivals] == ([(0, 1, 2), (0, 14)] if text is MOONCAKE else [()] * len(wanted))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "known are the columns"),
        (AZURE + "yesterday,1,2\n", "line 5"),
        ('{"timestamp": 0, "input_length": 4}\n', "line 1.*output_length"),
        (BURST_GPT.splitlines()[0] + "\n1,GPT-4,5,0,5,API log\n", "no request"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "trace.csv").write_text(text)
    with pytest.raises(SpecError, match=message):
        read_trace(path)


def test_another_rate_keeps_the_pattern(tmp_path: Path) -> None:
    (path := tmp_path / "trace.csv").write_text(AZURE)
    found = read_trace(path).at_rate(0.1)
    assert found.rate == pytest.approx(0.1)
    assert [one.at for one in found.arrivals] == pytest.approx([0.0, 30 * 4.314579 / 60, 30.0])


TRAFFIC = Traffic(rate=5.0, prompt=300, answer=100, seconds=2000.0, day=1000.0)


@pytest.mark.parametrize("shape", ["diurnal", "bursty", "heavy_tailed"])
def test_generated_arrivals_have_the_rate_and_come_from_the_seed(shape: str) -> None:
    found = generate(shape, TRAFFIC, seed=1)
    tolerance = 0.15 if shape == "heavy_tailed" else 0.1  # a few long sessions; gaps of a coefficient of variation of 3
    assert len(found.arrivals) / TRAFFIC.seconds == pytest.approx(5.0, rel=tolerance)
    assert found == generate(shape, TRAFFIC, seed=1) != generate(shape, TRAFFIC, seed=2)
    assert np.mean([one.answer for one in found.arrivals]) == pytest.approx(100, rel=0.05)
    assert all(one.prompt >= 1 and one.answer >= 1 for one in found.arrivals)


def test_bursts_have_the_published_spread() -> None:
    at = [one.at for one in generate("bursty", TRAFFIC, seed=0).arrivals]
    gaps = np.diff(at)
    assert gaps.std() / gaps.mean() == pytest.approx(BURST_CV, rel=0.1)


def test_a_day_has_its_peak_in_the_morning_of_the_sine() -> None:
    found = generate("diurnal", Traffic(5.0, 10, 10, 4000.0, day=4000.0), seed=0)
    quarters = np.histogram([one.at for one in found.arrivals], bins=4, range=(0, 4000))[0] / 5000
    mean = 0.8 * 2 / np.pi  # of the sine over a quarter around its peak, and over the others
    assert quarters == pytest.approx([1 + mean, 1 + mean, 1 - mean, 1 - mean], rel=0.1)


def test_turns_of_a_session_share_all_that_was_said() -> None:
    found = generate("heavy_tailed", Traffic(1.0, 100, 50, 2000.0, longest=4000), seed=3)
    sessions: dict[int, list[Arrival]] = {}
    for one in found.arrivals:
        if one.prefix:
            sessions.setdefault(one.prefix[0], []).append(one)
    turns = max(sessions.values(), key=len)
    assert len(turns) > 5
    for before, after in itertools.pairwise(turns):
        assert after.prompt > before.prompt + before.answer
        assert after.prefix[: len(before.prefix)] == before.prefix
        assert after.prompt + after.answer <= 4000
