"""The time of a step: it adds up, arrays price as their elements do, exchanges cost what the links say."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.devices.links import Fabric
from lmworks.plan.flops import model_flops_per_token
from lmworks.plan.memory.sheet import budget
from lmworks.plan.ops import fullest
from lmworks.plan.pipelines.schedule import stages_of
from lmworks.plan.software import EAGER, SOFTWARE
from lmworks.plan.step.comm import Links, StepComm, Weights, distinct_bins
from lmworks.plan.step.constants import Constants, Seen, chip_family, constants
from lmworks.plan.step.pipeline import StageSplit, stages
from lmworks.plan.step.price import price, price_uncalibrated, timeline
from lmworks.plan.step.uncalibrated import Uncalibrated
from lmworks.spec import Cluster, ModelSpec, SpecError, catalogue
from lmworks.spec.run import SCHEDULES
from lmworks_validation.sources import SOURCES

LLAMA = ModelSpec.from_preset("llama3-8b")
H100 = catalogue()["H100-SXM-80GB"]
PLAIN = Constants(step_s={"*": 1e-12}, contention=0.0, stragglers=0.0)  # nothing but rates and links


def make(software: str = "torchtitan-compile", model: ModelSpec = LLAMA, **changes: Any) -> Case:
    return Case(model, H100, SOFTWARE[software], 4096, **changes)


def test_the_parts_add_up_and_every_one_has_a_tag() -> None:
    found = price(make(accumulation=8, dp_shard=8, tp=2, cp=2, pp=2, zero=1, sp=True))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert set(found.tags) >= set(found.parts)
    assert set(found.tags.values()) <= {"measured", "fitted", "modelled"}
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.interval[0] < found.seconds < found.interval[1]
    tokens = 8 * 8 * 4096
    assert found.tokens_per_s == pytest.approx(tokens / found.seconds)
    flops = tokens * model_flops_per_token(LLAMA, 4096)
    assert found.mfu == pytest.approx(flops / (found.seconds * 64 * 989e12))
    assert found.hfu > found.mfu


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_array_prices_as_its_elements_do(schedule: str) -> None:
    rng = np.random.default_rng(0)
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    numbers = {
        "tp": 2 ** rng.integers(0, 4, 12),
        "pp": 2 ** rng.integers(0, 4, 12),
        "cp": 2 ** rng.integers(0, 2, 12),
        "dp_shard": 2 ** rng.integers(0, 5, 12),
        "micro_batch": rng.integers(1, 5, 12),
        "accumulation": 16 * rng.integers(1, 4, 12),
    }
    case = make(zero=3, sp=True, recompute="full", schedule=schedule, virtual=virtual)
    together = price(case.replace(**numbers)).seconds
    alone = [price(case.replace(**{n: int(v[i]) for n, v in numbers.items()})).seconds for i in range(12)]
    np.testing.assert_allclose(together, np.array(alone, dtype=float), rtol=1e-12)


def test_more_constants_of_the_same_step_need_no_new_kernels() -> None:
    case = make(dp_shard=8, zero=3)
    bare = Uncalibrated.of(case)
    for given in (PLAIN, constants()):
        assert price_uncalibrated(bare, given).seconds == price(case, given).seconds


def test_tensor_parallel_sums_show_unless_they_are_cut_into_pieces() -> None:
    """Two all-reduces each way in each of 32 blocks, one each way for embedding and for head, three of a number."""
    case = make("megatron-2021", accumulation=2, tp=8)
    fabric = Fabric.of(Cluster(gpus_per_node=8), H100)
    once = fabric.seconds("all-reduce", 4096 * 4096 * 2, 8)
    small = fabric.seconds("all-reduce", 4 * 4096, 8)
    assert price(case, PLAIN).parts["tp"] == pytest.approx(2 * ((4 * 32 + 2) * once + 3 * small))
    # Sequence parallelism makes a gather and a scatter of each; Megatron gathers inputs once more.
    gather, scatter = (fabric.seconds(kind, 4096 * 4096 * 2, 8) for kind in ("all-gather", "reduce-scatter"))
    split = price(case.replace(sp=True), PLAIN).parts["tp"]
    assert split == pytest.approx(2 * ((4 * 32 + 2) * (gather + scatter) + 2 * 32 * gather + 3 * small))
    cut = case.replace(software=SOFTWARE["torchtitan-2025"])
    hidden = price(cut.replace(software=cut.software.__class__(**{**vars(cut.software), "async_tp": True})), PLAIN)
    assert hidden.parts["tp"] < price(cut, PLAIN).parts["tp"]
    assert hidden.hidden["tp"] > 0


def test_gradients_hide_behind_the_last_backward_pass_or_not_at_all() -> None:
    fabric = Fabric.of(Cluster(nodes=4, gpus_per_node=8), H100)
    summed = fabric.seconds("all-reduce", 4.0 * LLAMA.params, 32)
    shown = price(make("megatron-2021", dp_replicate=32), PLAIN)
    assert shown.parts["dp"] == pytest.approx(summed, rel=1e-6)
    assert shown.hidden["dp"] == 0
    unseen = price(make(dp_replicate=32, micro_batch=4), PLAIN)
    assert unseen.parts["dp"] + unseen.hidden["dp"] == pytest.approx(summed, rel=1e-6)
    assert unseen.parts["dp"] < 0.1 * summed


def test_zero_3_gathers_every_block_twice_and_shows_what_exceeds_the_work() -> None:
    case = make(dp_shard=8, zero=3)
    fabric = Fabric.of(Cluster(gpus_per_node=8), H100)
    block, root = LLAMA.block_params, LLAMA.params - 32 * LLAMA.block_params
    gather, reduce = fabric.seconds("all-gather", 2 * block, 8), fabric.seconds("reduce-scatter", 4 * block, 8)
    ends = fabric.seconds("all-gather", 2 * root, 8) + fabric.seconds("reduce-scatter", 4 * root, 8)
    found = price(case, PLAIN)
    everything = 32 * (2 * gather + reduce) + ends + gather + reduce
    assert found.parts["dp"] + found.hidden["dp"] == pytest.approx(everything)
    short = price(case.replace(seq=128), PLAIN)
    assert short.parts["dp"] > 5 * found.parts["dp"]


def test_recompute_costs_what_it_computes_again() -> None:
    kinds = ("none", "selective", "mlp", "full")
    none, selective, mlp, full = (price(make(recompute=kind), PLAIN).parts for kind in kinds)
    assert none["recompute"] == 0 < selective["recompute"] < mlp["recompute"] < full["recompute"]
    # PyTorch stops before a block's last product, Megatron does not.
    whole = price(make("megatron", recompute="full"), PLAIN).parts
    assert whole["recompute"] > full["recompute"]
    forward = sum(price(make("megatron"), PLAIN).parts[part] for part in ("matmul", "attention")) / 3
    assert whole["recompute"] == pytest.approx(forward, rel=0.1)
    assert price(make(recompute="full", recompute_every=2), PLAIN).parts["recompute"] == pytest.approx(
        full["recompute"] / 2
    )


def test_offload_pays_for_the_link_to_the_host() -> None:
    there, away = (price(make(dp_shard=8, zero=3, offload=kind)).parts for kind in ("none", "optimizer"))
    assert there["offload"] == 0
    link = LLAMA.params / 8 * 8 / (0.8e9 * H100.host_gbs)
    assert away["offload"] > link
    assert away["optimizer"] < there["optimizer"]


def test_activations_reach_the_host_behind_the_passes_or_are_waited_for() -> None:
    """32 blocks have two passes each to send and fetch; a link that is slower than those is waited for in both."""
    plain = price(make(), PLAIN)
    gib = 30 / 32  # whole pages of each of 30 blocks
    few, many = (price(make(offload_activations=size), PLAIN) for size in (gib, 1e6))
    both_ways = 2 * gib * 2**30 / 30e9  # eight GPUs share the memory of their machine
    alone = price(make(offload_activations=gib).replace(cluster=Cluster()), PLAIN)
    assert alone.hidden["offload"] == pytest.approx(2 * gib * 2**30 / (0.8e9 * H100.host_gbs))
    assert few.parts["offload"] == 0 and few.hidden["offload"] == pytest.approx(both_ways)
    assert few.seconds == pytest.approx(plain.seconds)
    slow = price(make(offload_activations=gib).replace(gpu=H100.replace(host_gbs=0.1)), PLAIN)
    assert slow.parts["offload"] + slow.hidden["offload"] == pytest.approx(2 * gib * 2**30 / 0.08e9)
    assert slow.seconds - plain.seconds == pytest.approx(slow.parts["offload"]) and slow.parts["offload"] > 0
    assert many.hidden["offload"] + many.parts["offload"] < 100 * both_ways  # no block sends more than it keeps


def test_less_power_is_a_slower_product() -> None:
    capped = make().replace(gpu=H100.replace(tdp_w=500.0))
    given = Constants(power=0.5)
    ratio = price(capped, given).parts["matmul"] / price(make(), given).parts["matmul"]
    assert ratio == pytest.approx((700 / 500) ** 0.5)


def test_hosts_that_launch_slowly_set_the_pace() -> None:
    tiny = ModelSpec.from_preset("gpt2-small")
    quick, slow = (
        price(make("nanogpt", tiny, micro_batch=1).replace(seq=128), Constants(launch_s={"compiled": each}))
        for each in (1e-9, 1e-4)
    )
    assert slow.seconds > 3 * quick.seconds
    assert slow.parts["matmul"] == quick.parts["matmul"]


def test_the_fullest_expert_is_the_one_that_chance_fills() -> None:
    """Against a thousand draws: of ranks and of experts, with many slots and with few."""
    rng = np.random.default_rng(0)
    for slots, bins in ((32768, 8), (2048, 128), (256, 128), (64, 16)):
        drawn = rng.multinomial(slots * bins, np.full(bins, 1 / bins), size=1000).max(axis=1).mean() / slots
        assert fullest(slots, bins) - 1 == pytest.approx(drawn - 1, rel=0.1)
    assert fullest(100, 1) == 1


def test_many_small_experts_cost_more_than_their_products() -> None:
    """128 experts of 768, eight for a token, against a dense MLP that computes as much."""
    small = ModelSpec(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, ffn=6144, context=4096,
        experts=128, top_k=8, expert_ffn=768,
    )  # fmt: skip
    dense = small.replace(experts=0)
    assert model_flops_per_token(dense, 4096) == pytest.approx(model_flops_per_token(small, 4096), rel=0.01)
    case = make("megatron", small, micro_batch=2, accumulation=16, dp_shard=16, zero=1)
    near, far = price(case.replace(ep=8)), price(case.replace(ep=16))
    plain = price(case.replace(model=dense))
    assert near.seconds > 1.5 * plain.seconds
    assert near.parts["experts"] > 0.2 * near.parts["matmul"]
    assert far.parts["ep"] > 2 * near.parts["ep"]  # over the network
    few = [price(case.replace(micro_batch=n)).parts["matmul"] / n for n in (1, 8)]
    assert few[0] > 1.05 * few[1]  # 256 rows an expert: of a short product, more of the last tile is empty


SMALL_EXPERTS = ModelSpec(
    layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, context=4096,
    experts=128, top_k=8, expert_ffn=768,
)  # fmt: skip


def test_whole_experts_lie_on_neighbours_tensor_parallel_ranks_included() -> None:
    """Megatron Core's own example of folding (transformer/moe/README.md): TP 4, CP 2, DP 8 leave EP 64 and EDP 1."""
    folded = make("megatron", SMALL_EXPERTS, tp=4, cp=2, dp_shard=8, pp=4, ep=64, sp=True, zero=1)
    groups = Links.of(folded).groups
    assert groups["ep"] == (64, 1) and groups["edp"] == (1, 64)
    apart = folded.replace(software=replace(folded.software, whole_experts=False), ep=8)
    assert Links.of(apart).groups["ep"] == (8, 4) and Links.of(apart).groups["edp"] == (2, 32)


def test_ranks_with_whole_experts_send_their_own_tokens_and_gather_nothing_around_them() -> None:
    case = make("megatron", SMALL_EXPERTS, tp=2, dp_shard=8, ep=8, sp=True, zero=1, micro_batch=8)
    folded, cut = (
        Uncalibrated.of(case.replace(software=replace(case.software, whole_experts=whole))) for whole in (True, False)
    )
    assert folded.comm.ep.inter_node == cut.comm.ep.intra_node == 0  # eight neighbours are one machine
    assert folded.comm.ep.intra_node < cut.comm.ep.inter_node / 5
    assert folded.comm.tp[0].intra_node == pytest.approx(cut.comm.tp[0].intra_node / 2)
    weights = [Weights.of(each.case).experts for each in (folded, cut)]
    assert weights == [128 // 8 * 3 * 2048 * 768, 128 // 8 * 3 * 2048 * 768 // 2]
    products = [each.work.block[0].parts(defaultdict(lambda: 1.0))["matmul"] for each in (folded, cut)]
    assert products[0] == pytest.approx(products[1], rel=0.15)  # half of the tokens, twice as much of each expert


def test_whole_experts_are_held_twice_over_and_updated_by_as_many_ranks() -> None:
    """Two tensor-parallel ranks: twice the weights of experts on each, two copies that share their states."""
    case = make("megatron", SMALL_EXPERTS, tp=2, dp_shard=8, ep=8, sp=True, zero=1)
    folded, cut = (
        budget(case.replace(software=replace(case.software, whole_experts=whole))) for whole in (True, False)
    )
    assert (
        folded.parameters - cut.parameters == 2 * 48 * 16 * 3 * 2048 * 768 / 2
    )  # bf16; 16 of 128 experts, half of each
    assert folded.optimizer == cut.optimizer


def test_machines_that_hold_some_of_a_tokens_experts() -> None:
    """By trying all choices of three among eight experts, two in each of four bins."""
    choices = [len({expert // 2 for expert in chosen}) for chosen in itertools.combinations(range(8), 3)]
    assert distinct_bins(4, 8, 3) == pytest.approx(np.mean(choices))
    assert np.all(distinct_bins(np.array([1, 8]), 8, 3) == [1, 3])


def test_a_token_that_travels_once_crosses_the_network_once_to_a_machine() -> None:
    """Eight experts on two machines: two crossings, not eight."""
    case = make("megatron", SMALL_EXPERTS, dp_shard=16, ep=16, zero=1, micro_batch=64)
    often, once = (
        StepComm.of(each, Weights.of(each)).ep.inter_node
        for each in (case.replace(software=replace(case.software, dispatch_once=once)) for once in (False, True))
    )
    assert once / often == pytest.approx(2 / 8, abs=0.03)


def test_a_dispatch_beside_another_micro_batch_is_hidden_up_to_contention() -> None:
    case = make("megatron", SMALL_EXPERTS, dp_shard=8, ep=8, zero=1, micro_batch=4, accumulation=8)
    shown, hidden = (
        price(case.replace(software=replace(case.software, overlapped_dispatch=beside)), PLAIN)
        for beside in (False, True)
    )
    assert hidden.parts["ep"] == 0 and hidden.hidden["ep"] == pytest.approx(shown.parts["ep"])


def test_one_graph_of_a_step_launches_nothing() -> None:
    case = make("megatron", SMALL_EXPERTS, dp_shard=8, ep=8, zero=1)
    launched, whole = (
        price(case.replace(software=replace(case.software, one_graph=one)), PLAIN) for one in (False, True)
    )
    assert launched.parts["host"] > 5e-3 and whole.parts["host"] == pytest.approx(0.0, abs=1e-9)


def test_deepspeed_hides_gathers_behind_products_alone() -> None:
    """On slow links: of what a block computes, attention and norms hide nothing."""
    case = make("deepspeed", dp_shard=16, zero=3).replace(cluster=Cluster(gpus_per_node=8, nic_gbs=2.0))
    bound, free = (
        price(case.replace(software=replace(case.software, gathers_by_module=each)), PLAIN) for each in (True, False)
    )
    others = sum(seconds for name, seconds in free.parts.items() if name in ("attention", "norms", "activation"))
    assert bound.parts["dp"] - free.parts["dp"] > 0.9 * others


def test_zero_3_of_2021_copies_what_it_gathers_rank_by_rank() -> None:
    """Three gathers of four tensors a block: forward, once more for what is computed again, and backward."""
    case = make("megatron-2021", dp_shard=1024, zero=3, recompute="full")
    slow, quick = (
        price(case, Constants(launch_s={"eager": each}, step_s={"*": 1e-12}, stragglers=0.0)) for each in (2e-5, 0.0)
    )
    assert slow.parts["dp"] - quick.parts["dp"] == pytest.approx(2e-5 * 1024 * 4 * 3 * 32)


# --- pipelines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_the_closed_cut_is_the_one_that_is_made(schedule: str) -> None:
    """Against `split_layers`, for shapes with a light and with a heavy head."""
    counts = {"1f1b": (1,), "zbv": (2,)}.get(schedule, (2, 3, 4))
    for name, ranks, virtual in itertools.product(("llama3-8b", "gpt2-xl", "llama3-1b"), (2, 3, 4, 5, 8, 12), counts):
        model = ModelSpec.from_preset(name)
        if ranks * virtual > model.layers:
            continue
        case = make("lmworks", model, accumulation=16, pp=ranks, virtual=virtual, schedule=schedule)
        sizes = [len(stage.layers) for stage in stages(case)]
        held = [sum(sizes[i] for i in stages_of(schedule, ranks, virtual, rank)) for rank in range(ranks)]
        last = held.pop(0 if schedule == "zbv" else -1)
        expected = (sizes[0], sizes[-1], np.mean(sizes[:-1]), max(held), last - sizes[-1])
        cut = StageSplit.of(case)
        assert (cut.first, cut.last, cut.mean, cut.middle_rank, cut.last_rank_rest) == pytest.approx(expected), (
            name,
            ranks,
            virtual,
        )


def off(schedule: str) -> dict[str, float]:
    """Closed form over timeline: two blocks a stage or more, at least twice as many micro-batches as ranks."""
    found = {}
    for name, software, ranks, rounds, recompute in itertools.product(
        ("llama3-8b", "gpt2-xl"), ("lmworks-compile", "megatron"), (2, 4, 8), (2, 4), ("none", "full")
    ):
        model, virtual = ModelSpec.from_preset(name), 1 if schedule in ("gpipe", "1f1b") else 2
        if model.layers < 2 * ranks * virtual or (software == "megatron" and model.layers % (ranks * virtual)):
            continue
        case = make(software, model, accumulation=rounds * ranks, pp=ranks, virtual=virtual, schedule=schedule)
        case = case.replace(seq=1024, recompute=recompute, micro_batch=4)
        label = f"{name} {software} pp={ranks} m={rounds * ranks} {recompute}"
        found[label] = float(price(case, Constants()).seconds / timeline(case, Constants()).seconds) - 1
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_follows_the_timeline(schedule: str) -> None:
    """Nearly all within 2%; the worst are V-shaped and looped ones, whose head makes the halves of a stage uneven."""
    found = off(schedule)
    apart = np.abs(list(found.values()))
    assert apart.mean() <= 0.01, found
    assert apart.max() <= 0.035, max(found.items(), key=lambda item: abs(item[1]))


def test_no_time_is_negative_however_few_the_blocks() -> None:
    """Arrays hold layouts that nobody would run, and these must not disturb the others."""
    for layers, schedule, software in itertools.product((1, 3, 8), SCHEDULES, ("lmworks", "megatron")):
        model, virtual = ModelSpec.from_preset("gpt2-small").replace(layers=layers), np.full(4, 2)
        numbers = {"pp": np.array([1, 2, 4, 8]), "accumulation": np.array([1, 4, 8, 16])}
        virtual = np.ones(4, int) if schedule in ("gpipe", "1f1b") else virtual
        with np.errstate(all="raise", under="ignore"):
            found = price(make(software, model, schedule=schedule, virtual=virtual, **numbers))
        assert np.all(np.isfinite(found.seconds))
        assert all(np.all(seconds >= 0) for seconds in found.parts.values())


def test_a_timeline_without_a_pipeline_is_the_price() -> None:
    case = make(dp_shard=8, zero=3)
    assert timeline(case).seconds == price(case).seconds


# --- constants --------------------------------------------------------------------------------------------


def test_every_source_has_constants_that_never_saw_it() -> None:
    for name, source in SOURCES.items():
        if source.fitted:
            assert constants(name) != constants()
    with pytest.raises(SpecError, match="no fit leaves out the source 'vtrian'; did you mean 'vtrain'"):
        constants("vtrian")


def test_fitted_constants_are_plausible() -> None:
    given = constants()
    assert all(0.7 < factor < 1.6 for factor in given.gemm.values())
    assert all(0.8 < factor < 1.25 for factor in given.software.values())
    assert 0 < given.contention < 1 and 0 < given.stragglers < 0.02
    assert all(1e-6 < seconds < 2e-4 for seconds in given.launch_s.values())


def test_what_has_no_factor_of_its_own_takes_that_of_its_kind() -> None:
    given = constants()
    known, other = (given.factors(gpu, EAGER, world=8) for gpu in (H100, catalogue()["MI300X"]))
    assert (known["gemm"], other["gemm"]) == (given.gemm["H100"], given.gemm["*"])
    assert other["attention"] == given.attention["*"]
    blind = constants("simumax")  # the only runs on B200: products as on H100
    assert blind.gemm["B200"] == pytest.approx(blind.gemm["H100"], rel=1e-3)
    assert constants("vtrain").launch_s["megatron-deepspeed"] == constants("vtrain").launch_s["eager"]


def test_boards_with_the_same_chip_share_constants() -> None:
    gpus = catalogue()
    assert chip_family(gpus["H100-PCIe-80GB"]) == chip_family(H100) == "H100"
    assert chip_family(gpus["GB200"]) == chip_family(gpus["B200-SXM"]) == "B200"


def test_what_was_never_fitted_has_a_wider_interval_and_says_so() -> None:
    known, unknown = price(make()), price(make().replace(gpu=catalogue()["MI300X"]))
    assert known.notes == ()
    assert "MI300X" in unknown.notes[0]
    widths = [found.interval[1] / found.interval[0] for found in (known, unknown)]
    assert widths[1] > widths[0]
    assert unknown.tags["matmul"] == "modelled"


def test_each_thing_that_was_never_fitted_widens_the_interval_by_its_own() -> None:
    """Variances add up: log of the 95th percentile is 1.645 standard deviations, by hand."""
    seen = Seen(frozenset({"torchtitan-compile", "megatron"}), frozenset({"H100"}), frozenset({"bf16"}))
    given = replace(PLAIN, spread=0.03, unseen=0.04, seen=seen)
    experts = ModelSpec.from_preset("mixtral-8x7b")
    cases = {
        0.03: make(),
        0.05: make().replace(dtype="fp8"),
        (0.03**2 + 2 * 0.04**2) ** 0.5: make(model=experts).replace(dtype="fp8"),
        (2 * 0.04**2) ** 0.5: make("llm-foundry").replace(dtype="fp8"),
    }
    for deviation, case in cases.items():
        found = price(case, given)
        assert np.log(found.interval[1] / found.seconds) == pytest.approx(1.645 * deviation)
        assert np.log(found.seconds / found.interval[0]) == pytest.approx(1.645 * deviation)
    assert price(cases[0.05], given).notes == ("no run in fp8 was fitted: the interval is wider",)
    unknown = price(make("llm-foundry", experts).replace(dtype="fp8"), given).notes
    assert [note.split(" was")[0] for note in unknown] == [
        "no run of llm-foundry on H100-SXM-80GB", "no run in fp8", "no run with experts"
    ]  # fmt: skip


def test_constants_without_a_source_have_not_seen_what_only_it_had() -> None:
    """SimuMax's are the only runs on a B200; bf16 is in others as well."""
    assert constants().seen.gpus - constants("simumax").seen.gpus == {"B200"}
    assert constants("simumax").seen.dtypes == constants().seen.dtypes >= {"bf16", "fp16", "fp8"}
    assert not constants().seen.experts and "megatron-deepspeed" not in constants("vtrain").seen.software
