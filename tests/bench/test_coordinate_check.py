"""`lmworks bench coordinate-check`: flat under μP, growing under the standard parametrization."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lmworks.bench.coordinate_check import slope
from lmworks.cli.bench_coordinates import verdict_of
from typed import lmworks

SMALL = ["tiny", "optim.lr=4e-3", "data.seq=32", "data.micro_batch=4"]


@pytest.mark.slow
def test_flat_under_mup_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A missing multiplier, initial scale or learning rate of any role gives a slope of at least a half."""
    plot = tmp_path / "check.png"
    options = ["--widths", "64,128,256", "--depths", "2,4,8", "--seeds", "5", "--plot", str(plot), "--json"]
    code, out, err = lmworks(capsys, "study", "coordinate-check", *SMALL, *options)
    assert code == 0, err
    found = json.loads(out)
    for check in found["checks"]:
        flat = {role: curve["slopes"][-1] for role, curve in check["roles"]["mup"].items()}
        assert all(abs(one) <= 0.1 for one in flat.values()), (check["axis"], flat)
        assert check["steepest"]["standard"]["slope"] > 0.3, check["axis"]
    widths, depths = found["checks"]
    assert (widths["axis"], widths["sizes"], depths["axis"], depths["sizes"]) == (
        "width",
        [64, 128, 256],
        "depth",
        [2, 4, 8],
    )
    grown = {role: curve["slopes"][-1] for role, curve in widths["roles"]["standard"].items()}
    assert abs(grown.pop("embedding")) < 0.1
    assert all(one > 0.3 for one in grown.values()), grown
    # Before the first step the standard deviation of initial weights is all there is: 1/√width for the logits of μP.
    assert widths["roles"]["mup"]["logits"]["slopes"][0] == pytest.approx(-0.5, abs=0.05)
    assert widths["roles"]["standard"]["query"]["slopes"][0] == pytest.approx(0.5, abs=0.05)
    assert {"attention out", "mlp out"} == set(widths["roles"]["mup"]) - set(depths["roles"]["mup"])
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("slope", "verdict"), [(-0.1, "flat"), (0.18, "not clear"), (-0.18, "not clear"), (0.21, "width matters")]
)
def test_a_slope_within_the_noise_of_one_seed_is_no_verdict(slope: float, verdict: str) -> None:
    assert verdict_of(slope, "width").startswith(verdict)


def test_slope_of_a_power_law() -> None:
    assert slope([64, 128, 512], [3 * math.sqrt(size) for size in (64, 128, 512)]) == pytest.approx(0.5)
    assert slope([64, 128], [0.0, 0.0]) == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--widths", "64"], "--widths 64: name at least two sizes"),
        (["--widths", "128,64"], "the smallest first"),
        (["--widths", "64,wide"], "--widths 64,wide: write whole numbers with commas"),
        (["--widths", "64,100"], "hidden = 100 does not keep the proportions of a model with hidden = 64, heads = 4"),
        (["--depths", "0,2"], "--depths 0,2: write whole numbers"),
        (["--plot", "check.txt"], "--plot check.txt: name a file that ends in"),
    ],
)
def test_wrong_sizes_are_named(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = lmworks(capsys, "bench", "coordinate-check", *SMALL, *words)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
