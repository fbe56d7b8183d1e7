"""Layers that differ in attention: which has a window, and which combinations of keys mean something."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.spec import ModelSpec, RunSpec, SpecError

GEMMA = {"sliding_window": 8, "layer_types": ["sliding", "sliding", "full"]}
LONG = {"type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
HEADS: dict[str, Any] = {"hidden": 64, "heads": 4}


def test_layer_types_are_repeated() -> None:
    model = ModelSpec.from_dict({"layers": 7, **HEADS, **GEMMA})
    assert [model.window_of(layer) for layer in range(7)] == [8, 8, 0, 8, 8, 0, 8]
    assert model.full_layers == 2
    assert ModelSpec.from_dict(model.to_dict()) == model and hash(model) == hash(model.replace())
    local = model.replace(rope_local_theta=50.0)
    assert [local.local_rope(layer) for layer in range(3)] == [True, True, False]
    assert not model.local_rope(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding", "full"]}, r"layer_types needs model\.sliding_window"),
        ({**GEMMA, "layer_types": ["sliding", "chunked"]}, "'chunked' is not one of: sliding, full"),
        ({**GEMMA, "layer_types": ["sliding"]}, "must name both kinds"),
        ({**GEMMA, "layer_types": "full"}, r"layer_types must be a list, e\.g\. model\.layer_types="),
        ({"rope_local_theta": 1e4, "sliding_window": 8}, r"rope_local_theta needs model\.layer_types"),
        ({"rope_scaling": {**LONG, "short_factor": []}}, r"rope_scaling\.short_factor is needed"),
        ({"rope_scaling": {**LONG, "type": "yarn"}}, r"short_factor needs model\.rope_scaling\.type = 'longrope'"),
        ({"rope_scaling": {**LONG, "long_factor": [2.0] * 7}}, "long_factor has 7 numbers for 8 rotary pairs"),
        ({"rope_scaling": {**LONG, "long_factor": [0.0] * 8}}, "long_factor must be positive"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_dict({**HEADS, **changes})


def test_context_parallel_ranks_do_not_know_the_longest_position() -> None:
    model = {**HEADS, "context": 128, "rope_scaling": LONG}
    with pytest.raises(SpecError, match="'longrope' goes by the longest position"):
        RunSpec.from_dict({"model": model, "parallel": {"cp": 2}, "data": {"seq": 64}})
