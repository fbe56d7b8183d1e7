"""A host that launches and a GPU that works: the closed form against the two followed phase by phase."""

from __future__ import annotations

import itertools

import pytest

from lmworks.plan.case import Case
from lmworks.plan.software import SOFTWARE
from lmworks.plan.step.constants import constants
from lmworks.plan.step.micro_batch import host_bound_seconds
from lmworks.plan.step.price import Step, price
from lmworks.plan.step.uncalibrated import Uncalibrated
from lmworks.spec import ModelSpec, catalogue

H200 = catalogue()["H200-SXM-141GB"]
SMALL = ModelSpec.from_preset("gpt2-small")


def followed(phases: list[tuple[float, float]], batches: int, update: float, beside: float) -> float:
    """The end of a step: a phase is done when the GPU has worked it off, and not before the host has launched it."""
    host = gpu = 0.0
    for busy, launching in phases * batches:
        host += launching
        gpu = max(gpu + busy, host)
    return max(gpu + update, host + beside)


SECONDS = (0.0, 1.0, 3.0)


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_a_step_lasts_as_long_as_its_host_and_its_gpu_followed_in_turn(batches: int) -> None:
    for times in itertools.product(SECONDS, repeat=6):
        phases = list(zip(times[:3], times[3:], strict=True))
        busy = batches * sum(times[:3]) + 0.5
        wait = host_bound_seconds(phases, batches, 0.5, 2.0)
        assert busy + wait == pytest.approx(followed(phases, batches, 0.5, 2.0))


def small(software: str = "lmworks", **changes: float | str) -> Case:
    return Case(SMALL, H200, SOFTWARE[software], 128, micro_batch=1).replace(**changes)


def test_a_step_too_small_for_its_gpu_takes_its_hosts_time() -> None:
    """16 sequences of 128 keep a GPU as idle as one does; a host that is twice as slow takes twice as long."""
    one, more, slow = (float(price(case).seconds) for case in (small(), small(micro_batch=2), small(host=2.0)))
    assert more == pytest.approx(one, rel=0.02)
    assert slow == pytest.approx(2 * one, rel=0.02)


def test_selective_recompute_costs_an_eager_host_more_than_computing_all_again() -> None:
    """Measured on one H200: 50, 88 and 132 ms for none, full and selective; compiled blocks have no such hooks."""
    none, full, selective = (float(price(small(recompute=word)).seconds) for word in ("none", "full", "selective"))
    assert 1.4 < full / none < 2.1 and 2.0 < selective / none < 3.1
    assert launches("lmworks", "selective") - launches("lmworks", "none") > 70  # in each pass
    assert launches("lmworks", "full", 2) - launches("lmworks", "none") == pytest.approx(12)
    assert launches("lmworks-compile", "selective") == launches("lmworks-compile", "none")


def launches(software: str, recompute: str, every: int = 1) -> float:
    """Of one block's forward pass."""
    case = small(software, recompute=recompute, recompute_every=every)
    return float(Step.of(Uncalibrated.of(case), constants()).micro_batch.block.forward.launches)
