"""Serving: bytes against parameter counts, steps against measured engines, queues against simulated ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fit_serving import host_limits
from lmworks.cli.plan_serve import serve
from lmworks.plan.memory.reserve import reserve
from lmworks.plan.serving.batching import Lengths, chunks, queueing_seconds, steady
from lmworks.plan.serving.host import HostLimits
from lmworks.plan.serving.inference import Deployment, Rates
from lmworks.plan.serving.plans import (
    Demand,
    Plan,
    Slo,
    batch_quantile,
    candidates,
    choose,
    degrees,
    plan,
    serving_memory,
    times,
)
from lmworks.plan.serving.served_model import Experts, ServedModel, compute_format
from lmworks.spec import PRESETS, ModelSpec, SpecError, catalogue

H100, H200, A100, L4 = (catalogue()[name] for name in ("H100-SXM-80GB", "H200-SXM-141GB", "A100-SXM-80GB", "L4"))
LENGTHS = Lengths(1024, 256)


def served(preset: str) -> ServedModel:
    return ServedModel.of(ModelSpec.from_preset(preset))


def on(preset: str, gpu: object = H100, **options: object) -> Deployment:
    return Deployment(served(preset), gpu, Rates.of("vllm"), **options)  # type: ignore[arg-type]


# --- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_is_served(preset: str) -> None:
    model = ModelSpec.from_preset(preset)
    assert served(preset).params == model.params
    assert served(preset).weight_bytes("bf16") == 2 * model.params


def test_bytes_of_quantised_weights() -> None:
    """Llama 3 8B: 6.98e9 numbers in the blocks are quantised, embedding and head (2 × 0.525e9) and norms are not."""
    model = ModelSpec.from_preset("llama3-8b")
    table = 2 * 128_256 * 4096
    norms = 65 * 4096
    blocks = model.params - table - norms
    for weights, each in {"fp8": 1 + 4 / 16_384, "int8": 1 + 2 / 4096, "int4": 0.5 + 2.5 / 128, "fp4": 0.5625}.items():
        assert served("llama3-8b").weight_bytes(weights) == pytest.approx(each * blocks + 2 * (table + norms))
    half = served("llama3-8b").weight_bytes("bf16", tp=2)
    assert half == 2 * ((model.params - norms) / 2 + norms)


def test_what_the_hardware_cannot_multiply_is_widened() -> None:
    assert compute_format("fp8", H100) == "fp8"
    assert compute_format("fp8", A100) == "bf16"
    assert compute_format("int4", H100) == "bf16"
    assert compute_format("fp4", H100) == "bf16"
    assert compute_format("bf16", catalogue()["V100-SXM2-32GB"]) == "fp16"


def test_room_of_llama3_8b_on_an_h100() -> None:
    """Engines take nine tenths of 79.2 GiB, 16.06 GB are weights; a sequence of 8192 tokens takes 1 GiB."""
    space = serving_memory(on("llama3-8b"))
    assert (space.memory, space.usable) == (0.99 * 80 * 2**30, pytest.approx(0.9 * 79.2 * 2**30))
    assert space.context == reserve().context
    assert space.weights == 2 * 8_030_261_248
    assert 0.5e9 < space.workspace < 2e9
    assert space.cache == space.usable - space.weights - space.workspace - space.context
    found = plan(on("llama3-8b"), Demand(Lengths(8000, 192), Slo()))
    assert found.max_batch == int(space.cache // 2**30)
    assert found.max_context == 8192  # what the model is made for


# --- experts ----------------------------------------------------------------------------------------------


def test_distinct_experts_against_drawn_ones() -> None:
    random, experts = np.random.default_rng(0), Experts(count=64, top_k=4, layers=1, size=1)
    for tokens in (1, 8, 64):
        met = [len({*np.concatenate([random.permutation(64)[:4] for _ in range(tokens)])}) for _ in range(300)]
        assert experts.distinct(tokens) == pytest.approx(np.mean(met), rel=0.02)


def test_busiest_rank_against_drawn_experts() -> None:
    random, experts = np.random.default_rng(0), Experts(count=64, top_k=4, layers=1, size=1)
    most = []
    for _ in range(500):
        met = {*np.concatenate([random.permutation(64)[:4] for _ in range(16)])}
        most.append(max(sum(expert // 8 == rank for expert in met) for rank in range(8)))
    assert experts.busiest(16, ranks=8, ep=8) == pytest.approx(np.mean(most), rel=0.06)
    assert experts.busiest(16, ranks=8, ep=1) == experts.distinct(16) / 8
    assert experts.busiest(10_000, ranks=8, ep=8) == pytest.approx(8)


# --- steps, against measured engines ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "batch", "ms"),
    [
        ("qwen3-0.6b", 1, 1.94), ("qwen3-0.6b", 8, 1.93), ("qwen3-0.6b", 64, 3.70),
        ("llama3-8b", 1, 5.09), ("llama3-8b", 8, 5.77), ("llama3-8b", 64, 9.56),
    ],
)  # fmt: skip
def test_steps_of_vllm_on_an_h200(preset: str, batch: int, ms: float) -> None:
    assert 1e3 * on(preset, H200).step(batch, context=843) == pytest.approx(ms, rel=0.11)


@pytest.mark.parametrize(("weights", "tokens_per_s"), [("bf16", 104.9), ("int8", 155.6), ("int4", 196.8)])
def test_gpt_fast_on_an_a100(weights: str, tokens_per_s: float) -> None:
    llama2 = ServedModel.of(ModelSpec(layers=32, hidden=4096, heads=32, ffn=11_008, vocab=32_000))
    deployment = Deployment(llama2, A100, Rates.of("vllm"), weights=weights)
    assert 1 / deployment.step(1, context=108) == pytest.approx(tokens_per_s, rel=0.2)


def test_a_step_is_never_faster_than_its_bytes_and_flops() -> None:
    for tp in (1, 2, 8):
        for batch in (1, 64, 1024):
            deployment = on("llama3-8b", tp=tp)
            floor = (deployment.weight_bytes - deployment.served.tables * 2 / tp) / 3.35e12
            assert deployment.step(batch, 1000) > floor
            assert deployment.step(batch, 1000) > 2 * batch * 7.5e9 / tp / 989e12


def test_the_host_sends_no_more_tokens_than_its_api_can() -> None:
    """One core, at 33 µs a token and 0.7 ms a request: 26,000 tokens a second of short answers, whatever the device."""
    limits, short = HostLimits.measured(), Lengths(128, 128)
    for preset, weights in (("qwen3-0.6b", "bf16"), ("llama3-1b", "fp8")):
        found = steady(on(preset, H200, weights=weights), short, np.array([1.0, 1024.0]))
        assert found.host_bound.tolist() == [False, True]
        assert found.rate[1] * 128 == pytest.approx(1e6 / (limits.token_us + limits.request_us / 128))
    large = steady(on("llama3-70b", tp=8), Lengths(1024, 1024), 256.0)
    assert not large.host_bound and large.tpot == pytest.approx(large.decode + 256 / 1024 * large.added)


def test_limits_of_the_host_are_those_of_our_own_runs() -> None:
    measured, committed = host_limits(), HostLimits.measured()
    assert asdict(committed) == pytest.approx(asdict(measured), rel=0.005)


def test_steps_take_arrays() -> None:
    deployment = on("qwen3-30b-a3b", tp=2, ep=2)
    batches = np.array([1.0, 16.0, 256.0])
    together = deployment.step(batches, 1000.0, prefill=np.array([0.0, 512.0, 0.0]))
    apart = [float(deployment.step(b, 1000.0, prefill=p)) for b, p in ((1.0, 0.0), (16.0, 512.0), (256.0, 0.0))]
    np.testing.assert_allclose(together, apart)
    assert (np.diff(deployment.step(batches, 1000.0)) > 0).all()


def test_parts_sum_up() -> None:
    deployment = on("mixtral-8x7b", tp=4)
    parts = deployment.parts(32, 1000, prefill=512)
    assert sum(parts.values()) == pytest.approx(deployment.step(32, 1000, prefill=512))
    assert all(seconds > 0 for seconds in parts.values())


def test_window_bounds_attention() -> None:
    """Mistral's window is 4096: beyond it neither bytes nor FLOPs grow."""
    deployment = on("mistral-7b")
    assert deployment.step(8, 4096) == deployment.step(8, 30_000)
    assert deployment.step(8, 2048) < deployment.step(8, 4096)


# --- batching ---------------------------------------------------------------------------------------------


def test_chunks() -> None:
    assert chunks(20_000, 8192) == [(8192, 0), (8192, 8192), (3616, 16_384)]
    assert chunks(8192, 8192) == [(8192, 0)]


def test_steady_state_against_a_simulated_engine() -> None:
    """Sixteen clients that ask again at once, run step by step: the formula's mean time between tokens."""
    deployment, lengths, batch = on("llama3-8b"), Lengths(2000, 100), 16
    left = np.linspace(1, lengths.output, batch).astype(int)  # tokens that each has still to come
    now, prompts = 0.0, 0
    for _ in range(2000):
        done = left == 0
        new = int(done.sum())
        prompts += new
        running = batch - new
        context = lengths.input + lengths.output - left[~done].mean()
        now += float(deployment.step(running, context, prefill=new * lengths.input, prompts=max(1, new)))
        left = np.where(done, lengths.output, left - 1)
    rate = prompts / now
    point = steady(deployment, lengths, batch)
    assert point.rate == pytest.approx(rate, rel=0.03)
    assert point.rate * lengths.output * point.tpot == pytest.approx(batch)  # Little


def test_waiting_against_a_simulated_queue() -> None:
    """Lindley's recursion: each waits for what is left of the one before."""
    random, share, count = np.random.default_rng(1), 0.6, 400_000
    service, gaps = random.exponential(0.1, count), random.exponential(0.1 / share, count)
    walk = np.concatenate([[0.0], np.cumsum(service - gaps)])
    waits = walk - np.minimum.accumulate(walk)
    assert queueing_seconds(share, 0.1) == pytest.approx(waits.mean(), rel=0.05)
    assert queueing_seconds(share, 0.1, 0.95) == pytest.approx(np.quantile(waits, 0.95), rel=0.05)
    assert queueing_seconds(0.01, 0.1, 0.95) == 0  # fewer than one in twenty wait at all


# --- the plan ---------------------------------------------------------------------------------------------


def test_the_promise_is_kept_and_no_replica_is_idle() -> None:
    demand = Demand(LENGTHS, Slo(ttft=0.5, tpot=0.03), rate=100)
    found = plan(on("llama3-8b"), demand)
    assert found.times is not None and found.point is not None
    assert found.times.ttft_quantile <= 0.5 and found.times.tpot_quantile <= 0.03
    assert found.replicas * found.point.rate == pytest.approx(100, rel=0.01)
    fewer = times(on("llama3-8b"), demand, 1.0)
    assert fewer.tpot < found.times.tpot
    one_less = 100 / (found.replicas - 1)
    alone = plan(on("llama3-8b"), replace(demand, rate=0))
    assert alone.point is not None and alone.point.rate < one_less  # what one replica yields is too little


def test_a_looser_promise_is_cheaper_and_a_higher_rate_needs_more() -> None:
    def gpus(rate: float, tpot: float) -> int:
        return plan(on("llama3-8b"), Demand(LENGTHS, Slo(tpot=tpot), rate)).gpus

    assert gpus(200, 0.02) > gpus(200, 0.05)
    assert gpus(400, 0.05) == pytest.approx(2 * gpus(200, 0.05), abs=1)


def test_a_promise_for_whole_requests() -> None:
    """The first of 256 tokens and the 255 after it."""

    def planned(e2e: float) -> Plan:
        return plan(on("llama3-8b"), Demand(LENGTHS, Slo(e2e=e2e), rate=200))

    tight, loose = planned(3.0), planned(6.0)
    assert tight.times is not None and loose.times is not None
    assert tight.times.e2e_quantile <= 3.0 < loose.times.e2e_quantile <= 6.0
    assert tight.times.e2e == pytest.approx(tight.times.ttft + 255 * tight.times.tpot)
    assert tight.gpus > loose.gpus
    assert planned(0.5).refused.startswith("even one request at a time takes ttft")
    with pytest.raises(SpecError, match=r"cannot meet the SLO.*--slo e2e=[\d.]+") as error:
        choose(served("llama3-70b"), H100, Demand(LENGTHS, Slo(e2e=0.1)))
    promise = str(error.value).split("--slo ")[1].split(", or")[0]
    assert not choose(served("llama3-70b"), H100, Demand(LENGTHS, Slo.parse(promise)))[0].refused


def test_money() -> None:
    """100 requests a second of 1280 tokens are 460.8 M tokens an hour."""
    found = plan(on("llama3-8b"), Demand(LENGTHS, Slo(tpot=0.05), rate=100), price_hour=2.0)
    prompt, answer, both = found.dollars_per_million()
    assert found.dollars_hour == 2.0 * found.gpus
    assert both == pytest.approx(found.dollars_hour / 460.8)
    assert prompt * 1024 + answer * 256 == pytest.approx(both * 1280)
    assert prompt < answer


def test_the_cheapest_degree_comes_first() -> None:
    found = candidates(served("llama3-70b"), H100, Demand(LENGTHS, Slo(ttft=1.0, tpot=0.05), rate=20))
    working = [p for p in found if not p.refused]
    assert [p.deployment.tp for p in found if p.refused] == [1]  # 141 GB of weights
    costs = [p.dollars_per_million()[2] for p in working]
    assert costs == sorted(costs) and len(costs) == 3
    assert working[-1].deployment.tp == 2  # so little room for the cache that a token costs most


def test_degrees_share_the_heads_evenly() -> None:
    assert degrees(served("llama3-8b"), H100) == [1, 2, 4, 8]
    assert degrees(served("llama3-70b"), catalogue()["GB200"]) == [1, 2, 4, 8, 16, 32, 64]  # one rack
    assert degrees(served("gpt2-xl"), H100) == [1]  # 25 heads
    assert degrees(served("qwen3-30b-a3b"), H100) == [1, 2, 4, 8]  # 4 KV heads: repeated on 8


def test_quantile_of_the_batch() -> None:
    random = np.random.default_rng(0)
    assert batch_quantile(40.0, 0.95) == pytest.approx(np.quantile(random.poisson(40, 100_000), 0.95), abs=1)


def test_kv_format_and_weights_make_room() -> None:
    demand = Demand(LENGTHS, Slo())
    wide, narrow = plan(on("llama3-8b"), demand), plan(on("llama3-8b", kv="fp8"), demand)
    assert narrow.max_batch in (2 * wide.max_batch, 2 * wide.max_batch + 1)
    assert plan(on("llama3-8b", weights="int4"), demand).max_batch > wide.max_batch


# --- where nothing works ----------------------------------------------------------------------------------


def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(SpecError, match=r"does not fit on 8 × H100-SXM-80GB.*--weights fp8 \(tp = 8\)"):
        choose(served("llama3-405b"), H100, Demand(LENGTHS, Slo()))
    vast = ServedModel.of(
        ModelSpec(layers=200, hidden=65_536, heads=512, kv_heads=8, vocab=128_256, context=8192), "vast"
    )
    with pytest.raises(SpecError, match="nothing in the catalogue"):
        choose(vast, L4, Demand(LENGTHS, Slo()))


def test_a_sequence_that_does_not_fit() -> None:
    found = plan(on("llama3-70b", tp=2, weights="int8"), Demand(Lengths(8000, 192), Slo()))
    assert not found.refused
    long = served("llama3-3b")
    with pytest.raises(SpecError, match=r"one sequence of 131,000 tokens takes .* GB; [\d,]+ tokens fit"):
        choose(long, L4, Demand(Lengths(130_000, 1000), Slo()), tp=1)


def test_a_promise_that_cannot_be_kept() -> None:
    demand = Demand(LENGTHS, Slo(ttft=0.05, tpot=0.001))
    with pytest.raises(SpecError, match=r"cannot meet the SLO: with tp = 8.*--slo (ttft=[\d.]+,tpot=[\d.]+)") as error:
        choose(served("llama3-70b"), H100, demand)
    promise = str(error.value).split("--slo ")[1].split(", or")[0]
    assert not choose(served("llama3-70b"), H100, replace(demand, slo=Slo.parse(promise)))[0].refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slo.parse("ttft=fast"), "is not KEY=SECONDS"),
        (lambda: Slo.parse("latency=1"), "'latency' is not an SLO here"),
        (lambda: Slo.parse("ttft=-1"), "must be more than 0"),
        (lambda: Slo(quantile=1.0), "below 1"),
        (lambda: Demand(LENGTHS, Slo(), rate=-3), "rate = -3"),
        (lambda: Demand(LENGTHS, Slo(), max_batch=0), "max_batch = 0"),
        (lambda: Lengths(0, 10), "input = 0 tokens"),
        (lambda: Rates.of("vlm"), "did you mean 'vllm'"),
        (lambda: on("llama3-8b", weights="fp6"), "'fp6' is not known"),
        (lambda: candidates(served("llama3-8b"), H100, Demand(LENGTHS, Slo()), tp=3), "tp = 3 is not possible"),
        (lambda: candidates(served("llama3-8b"), H100, Demand(Lengths(9000, 1), Slo())), "made for 8,192"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()  # type: ignore[operator]


# --- the command ------------------------------------------------------------------------------------------

app = typer.Typer()
app.command()(serve)


def test_command_prints_json_with_tags() -> None:
    line = "llama3-8b --gpu h100 --rate 10 --slo ttft=0.5,tpot=0.05 --input 1024 --output 256 --json"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    sheet = json.loads(result.output)
    chosen = sheet["chosen"]
    assert chosen["tp"] == 1 and chosen["replicas"] == 1 and chosen["memory"]["weights"] == 16_060_522_496
    assert chosen["ttft_quantile"] <= 0.5 and chosen["tpot_quantile"] <= 0.05
    assert chosen["dollars_per_million"]["all"] == pytest.approx(chosen["dollars_hour"] / (10 * 1280 * 3600 / 1e6))
    assert [row["tp"] for row in sheet["candidates"]] == [1, 2, 4, 8]
    assert set(sheet["tags"].values()) == {"fitted", "modelled"}
    assert set(sheet["tags"]) <= set(chosen)


def test_command_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["qwen3-8b", "--gpu", "l4", "--weights", "int4"])
    assert result.exit_code == 0, result.output
    assert "Cheapest: tp =" in result.output and "no engine was measured on L4" in result.output


def test_latent_attention_of_a_served_model() -> None:
    """DeepSeek-V3's attention, from the figures of its config: matrices, cache and attention FLOPs of one layer."""
    heads, hidden, rank, q_rank, nope, rope = 128, 7168, 512, 1536, 128, 64
    model = ModelSpec(layers=61, hidden=hidden, heads=heads, head_dim=nope, ffn=18432, vocab=129280, kv_lora_rank=rank,
                      q_lora_rank=q_rank, rope_head_dim=rope, v_head_dim=128)  # fmt: skip
    served = ServedModel.of(model)
    matrices = [(one.k, one.n, one.split) for one in served.linears]
    assert matrices[:4] == [
        (hidden, q_rank + rank + rope, "whole"),
        (q_rank, heads * (nope + rope), "columns"),
        (rank, heads * (nope + 128), "columns"),
        (heads * 128, hidden, "rows"),
    ]
    assert served.cache("bf16", tp=8).token_bytes == 61 * 2 * (rank + rope)  # every rank keeps all of it
    assert served.prefill_flops == 61 * 2 * heads * (nope + rope + 128)
    assert served.decode_flops == 61 * 2 * heads * (2 * rank + rope)
    assert served.params == model.params


def test_degrees_share_query_heads_of_latent_attention() -> None:
    """One latent vector for all heads: the cache does not bound tensor parallelism, the query heads do."""
    gpu = catalogue()["H100-SXM-80GB"]
    model = ModelSpec(hidden=640, heads=20, head_dim=32, ffn=1280, vocab=1280, kv_lora_rank=64, rope_head_dim=16)
    assert degrees(ServedModel.of(model), gpu) == [1, 2, 4]
