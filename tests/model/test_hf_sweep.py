"""No silent wrong load: random configurations of every family against `transformers`."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)

from hf_sweep import BASES, case, outcome  # noqa: E402

from lmworks.spec.hf_families import FAMILIES  # noqa: E402

QUICK, ALL = 10, 300


def sweep(family: str, seeds: range) -> Counter[str]:
    """How often each outcome was seen; the first difference is an error."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        config = case(family, seed)
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(config, Path(folder), seed)
        assert found in ("exact", "refused", "none"), f"case {seed} of {family} {found}: {config}"
        seen[found] += 1
    return seen


def test_every_family_is_swept() -> None:
    assert BASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", BASES)
def test_ten_configurations_are_exact_or_refused_by_key(family: str) -> None:
    assert sweep(family, range(QUICK))["exact"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_three_hundred_configurations_are_exact_or_refused_by_key(family: str) -> None:
    seen = sweep(family, range(ALL))
    assert seen["exact"] >= ALL / 5
