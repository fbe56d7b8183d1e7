"""The split into stages: complete, contiguous, and as balanced as any split can be."""

from __future__ import annotations

import itertools

import pytest

from lmworks.plan.flops import forward_flops_per_token
from lmworks.plan.pipelines.stages import Stage, min_max_split, split_layers
from lmworks.spec import ModelSpec, SpecError

SMALL = ModelSpec(layers=7, hidden=64, heads=4, vocab=512, context=64)
TOP_HEAVY = ModelSpec(layers=8, hidden=64, heads=4, vocab=20_000, context=64)


@pytest.mark.parametrize("model", [SMALL, TOP_HEAVY], ids=["small", "top-heavy"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_layer_is_in_one_stage_and_costs_add_up(model: ModelSpec, count: int) -> None:
    stages = split_layers(model, 64, count)
    assert [layer for stage in stages for layer in stage.layers] == list(range(model.layers))
    assert [stage.index for stage in stages] == list(range(count))
    assert all(len(stage.layers) >= 1 for stage in stages)
    assert [s.first for s in stages] == [True] + [False] * (count - 1)
    assert [s.last for s in stages] == [False] * (count - 1) + [True]
    whole = forward_flops_per_token(model, 64) + model.hidden
    assert sum(s.cost(model, 64) for s in stages) == pytest.approx(whole)
    assert sum(s.params(model) for s in stages) == model.params


@pytest.mark.parametrize("model", [SMALL, TOP_HEAVY], ids=["small", "top-heavy"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_split_has_a_cheaper_largest_stage(model: ModelSpec, count: int) -> None:
    def largest(ends: tuple[int, ...]) -> float:
        bounds = [0, *ends, model.layers]
        runs = [Stage(i, range(a, b), i == 0, i == count - 1) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
        return max(run.cost(model, 64) for run in runs)

    every = itertools.combinations(range(1, model.layers), count - 1)
    chosen = max(stage.cost(model, 64) for stage in split_layers(model, 64, count))
    assert chosen == pytest.approx(min(map(largest, every)))


def test_the_head_counts() -> None:
    """Its product costs more than several layers here, so the last stage has the fewest."""
    sizes = [len(stage.layers) for stage in split_layers(TOP_HEAVY, 64, 2)]
    assert sizes[1] < sizes[0]


def test_spare_layers_are_spread() -> None:
    """With a head that weighs nothing, five layers over three stages are 2 2 1, not 2 1 2 or 3 1 1."""
    light = ModelSpec(layers=5, hidden=64, heads=4, vocab=2, context=64)
    assert [len(stage.layers) for stage in split_layers(light, 64, 3)] == [2, 2, 1]


def test_a_tied_embedding_is_held_on_both_ends() -> None:
    tied = ModelSpec(layers=4, hidden=64, heads=4, vocab=512, context=64, tie_embeddings=True)
    assert sum(s.params(tied) for s in split_layers(tied, 64, 2)) == tied.params + tied.vocab * tied.hidden
    assert split_layers(tied, 64, 1)[0].params(tied) == tied.params


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"8 pipeline stages .* model.layers = 7"):
        split_layers(SMALL, 64, 8)


def test_least_largest_of_uneven_costs() -> None:
    assert min_max_split([1, 2, 3, 4, 5, 6, 7, 8, 9], 3) == 17
