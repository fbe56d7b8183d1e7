"""`--slo`: the same words wherever it is taken."""

from __future__ import annotations

import pytest

from lmworks.bench.serve import Slo as Measured
from lmworks.plan.serving.plans import Slo as Planned
from lmworks.spec import SpecError
from lmworks.spec.serving import parse_slo


def test_three_objectives() -> None:
    assert parse_slo("ttft=0.5, tpot=0.05,e2e=10,") == {"ttft": 0.5, "tpot": 0.05, "e2e": 10.0}
    assert parse_slo("") == {}


def test_the_former_word_is_still_read() -> None:
    assert parse_slo("itl=0.05") == {"tpot": 0.05}


@pytest.mark.parametrize("kind", [Measured, Planned])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "'speed' is not an SLO here, ttft, tpot, e2e are"),
        ("ttft", "'ttft' is not KEY=SECONDS"),
        ("ttft=nan", "'ttft=nan' is not KEY=SECONDS"),
        ("e2e=0", "'e2e=0' must be more than 0"),
        ("tpot=1,itl=2", "tpot is given twice"),
    ],
)
def test_every_command_refuses_alike(kind: type[Measured] | type[Planned], text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind.parse(text)


@pytest.mark.parametrize("kind", [Measured, Planned])
def test_every_command_takes_all(kind: type[Measured] | type[Planned]) -> None:
    slo = kind.parse("ttft=0.5,tpot=0.05,e2e=10")
    assert (slo.ttft, slo.tpot, slo.e2e) == (0.5, 0.05, 10.0)
