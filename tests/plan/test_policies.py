"""What a budget of activations makes of the blocks, against every other choice that fits."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from lmworks.plan.activation_offload import offloaded_bytes
from lmworks.plan.policies import (
    POLICIES,
    offloadable_bytes_by_policy,
    policies,
    policies_by_cost,
    recompute_seconds,
    saved_bytes_by_policy,
)
from lmworks.spec import RunSpec, load_run

HALF = ("precision.dtype=bf16", "precision.weights=bf16", "precision.states=bf16", "precision.master=false")


def llama(seq: int, *changes: str) -> RunSpec:
    """16,384 tokens of Llama 3 8B on a GPU."""
    tokens = (f"data.seq={seq}", f"data.micro_batch={16384 // seq}")
    return load_run("llama3-8b", [*HALF, *tokens, "cluster.device=cuda", *changes])


def with_budget(spec: RunSpec, size: float) -> RunSpec:
    return spec.replace(parallel=spec.parallel.replace(recompute="budget", recompute_budget=size / 2**30))


def test_what_a_block_keeps_in_units_of_its_input() -> None:
    """Compiled: input 1, q, k, v 1.5, attention 1, its product 1, gate and up 3.5 each; a number a head beside."""
    spec = llama(8192, "parallel.compile=true")
    unit = 16384 * 4096 * 2
    assert {policy: round(size / unit, 1) for policy, size in saved_bytes_by_policy(spec).items()} == {
        "none": 17.0, "selective": 11.5, "mlp": 4.5, "full": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("seq", [8192, 512])
def test_a_budget_is_kept_and_none_that_fits_is_faster(seq: int) -> None:
    """But for what the last block that gave something up could have spared: the choice is greedy."""
    spec = llama(seq)
    each, seconds, blocks = saved_bytes_by_policy(spec), recompute_seconds(spec), 8
    mixtures = [
        Counter(dict(zip(POLICIES, (*counts, blocks - sum(counts)), strict=True)))
        for counts in itertools.product(range(blocks + 1), repeat=len(POLICIES) - 1)
        if sum(counts) <= blocks
    ]
    one = max(
        seconds[further] - seconds[here]
        for here, further in itertools.pairwise(["none", *policies_by_cost(spec, each)])
    )
    seen = set()
    for share in range(7, 101, 3):
        budget = share / 100 * blocks * each["none"]
        chosen = Counter(policies(with_budget(spec, budget), range(blocks)))
        assert sum(each[policy] * count for policy, count in chosen.items()) <= budget
        fitting = [mix for mix in mixtures if sum(each[policy] * count for policy, count in mix.items()) <= budget]
        best = min(sum(seconds[policy] * count for policy, count in mix.items()) for mix in fitting)
        assert sum(seconds[policy] * count for policy, count in chosen.items()) < best + one
        seen |= set(chosen)
    assert seen == set(POLICIES) if seq == 8192 else seen == set(POLICIES) - {"mlp"}


def test_attention_is_computed_again_last_where_it_is_dear_for_its_bytes() -> None:
    """Its FLOPs grow with the sequence, and its bytes do not."""
    assert policies_by_cost(llama(8192), saved_bytes_by_policy(llama(8192))) == ["selective", "mlp", "full"]
    assert policies_by_cost(llama(512), saved_bytes_by_policy(llama(512))) == ["selective", "full"]


def test_the_choice_is_the_same_whoever_asks() -> None:
    """A trainer need not know by name the GPU that a plan was made for."""
    budget = 0.4 * 32 * saved_bytes_by_policy(llama(8192))["none"]
    named = (with_budget(llama(8192, *gpu), budget) for gpu in ((), ("cluster.gpu=a100",), ("cluster.gpu=B200-SXM",)))
    first, *others = (policies(spec, range(32)) for spec in named)
    assert Counter(first).keys() == {"mlp", "selective"} and others == [first, first]


def test_what_waits_in_host_memory_is_no_part_of_a_budget() -> None:
    """Compiled: 20 GiB on the host, dealt to 30 blocks, keep as many from computing their MLP again."""
    spec = llama(8192, "parallel.compile=true")
    each, budget = saved_bytes_by_policy(spec), 26.2 * 2**30
    assert Counter(policies(with_budget(spec, budget), range(32))) == {"mlp": 23, "selective": 9}
    away = spec.replace(parallel=spec.parallel.replace(offload_activations=20.0))
    chosen = policies(with_budget(away, budget), range(32))
    assert Counter(chosen) == {"selective": 32}
    assert budget - each["selective"] < sum(each[one] for one in chosen) - 20 * 2**30 <= budget
    # An eager block's checkpoint holds all but its input: 30 inputs of 1/8 GiB are all that can go.
    eager = llama(8192, "parallel.offload_activations=20")
    assert sum(offloaded_bytes(eager, ["selective"] * 32, offloadable_bytes_by_policy(eager))) == 30 * 2**27
    assert sum(offloaded_bytes(eager, ["none"] * 32, offloadable_bytes_by_policy(eager))) == pytest.approx(
        20 * 2**30, rel=1e-5
    )


def test_blocks_that_send_nothing_compute_again_first() -> None:
    """Recomputing one that sends all that it keeps would free nothing."""
    spec = llama(8192, "parallel.offload_activations=95")
    chosen = policies(with_budget(spec, 5 * 2**30), range(32))
    assert chosen == ["none"] * 31 + ["full"]
