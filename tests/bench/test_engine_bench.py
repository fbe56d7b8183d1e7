"""What the engine is measured by: the floor in bytes, the workload, the trace of steps; and the page of the profile."""

from __future__ import annotations

import re

import pytest
import torch

from lmworks import LLM
from lmworks.bench.engine import EngineBench, bench_offline, fit_to_context, quantile, traced
from lmworks.bench.engine_profile import engine_page, profile_engine
from lmworks.bench.roofline import DecodeRoofline, measure_bandwidth
from lmworks.bench.workload import Workload, make_workload, read_range
from lmworks.engine.core.kv_cache import KVCacheShape
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.quantization.quantized_model import empty_like_quantized
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec, SpecError


def floor_of(name: str, bandwidth: float = 4.27e12, **changes: object) -> DecodeRoofline:
    spec = ModelSpec.from_preset(name, **changes)
    with torch.device("meta"):
        model = GPT(spec).to(torch.bfloat16)
    return DecodeRoofline(model, KVCacheShape.of(spec, EngineSpec(), torch.bfloat16), bandwidth)


# --- the floor --------------------------------------------------------------------------------------------


def test_the_floors_that_are_known() -> None:
    """8B: 15.01 GB without the input embedding, 3.52 ms at 4.27 TB/s; Qwen3-0.6B, whose embedding is its head, 0.28."""
    llama, qwen = floor_of("llama3-8b"), floor_of("qwen3-0.6b")
    assert llama.weight_bytes(1) == pytest.approx(15.01e9, rel=1e-3) == llama.weight_bytes(64)
    assert 1e3 * llama.seconds(1, 0) == pytest.approx(3.52, abs=0.01)
    assert 1e3 * qwen.seconds(1, 0) == pytest.approx(0.28, abs=0.005)


def test_quantized_weights_are_read_as_they_are_stored() -> None:
    """8B: a byte for each number of blocks and head, an fp32 scale a channel, norms in bf16."""
    roofline = floor_of("llama3-8b")
    spec = roofline.model.spec
    with torch.device("meta"):
        empty_like_quantized(roofline.model, "int8", {})
    channels = spec.layers * (spec.q_dim + 2 * spec.kv_dim + 2 * spec.hidden + 2 * spec.ffn) + spec.vocab
    norms = spec.norm_params + 2 * spec.layers * spec.hidden
    numbers = spec.params - spec.vocab * spec.hidden - norms
    assert roofline.weight_bytes(1) == numbers + 4 * channels + 2 * norms == pytest.approx(7.51e9, rel=1e-3)


def test_the_cache_is_read_by_every_sequence_up_to_its_window() -> None:
    llama = floor_of("llama3-8b")
    assert llama.kv_bytes(3, 1000) == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert floor_of("mistral-7b").kv_bytes(1, 10_000) == 4096 * 32 * 2 * 8 * 128 * 2


def test_only_experts_that_are_visited_are_read() -> None:
    moe = floor_of("mixtral-8x7b")
    spec = moe.model.spec
    expert = 3 * spec.hidden * spec.expert_ffn * spec.layers * 2
    assert moe.weight_bytes(10_000) - moe.weight_bytes(1) == pytest.approx(6 * expert)  # 2 of 8 against all


def test_learned_positions_are_looked_up() -> None:
    gpt2 = floor_of("gpt2-small")
    assert gpt2.weight_bytes(1) == 2 * (gpt2.model.spec.params - 1024 * 768)


def test_a_copy_has_a_pace() -> None:
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13


# --- the workload -----------------------------------------------------------------------------------------


def test_the_workload_is_that_of_the_peers() -> None:
    requests = Workload().draw(1000)
    again = Workload().draw(1000)
    assert [r.prompt for r in requests] == [r.prompt for r in again]
    prompts, answers = [len(r.prompt) for r in requests], [r.params.max_tokens for r in requests]
    for lengths in (prompts, answers):
        assert len(lengths) == 256 and min(lengths) >= 100 and max(lengths) <= 1024
        assert abs(sum(lengths) / 256 - 562) < 60  # five deviations of the mean of 256 even draws
    assert (sum(prompts), sum(answers)) == (144_831, 144_160)  # the peers' draw: 143,501 and 144,294
    assert [len(r.prompt) for r in Workload().draw(70)] == prompts
    assert all(r.params.ignore_eos and r.params.temperature == 0.6 for r in requests)
    assert {token for r in requests for token in r.prompt} <= set(range(1000))
    assert Workload(seed=1).draw(1000)[0].prompt != requests[0].prompt


def test_lengths_shrink_to_a_small_context() -> None:
    assert Workload().within(2048) == Workload()
    small = Workload().within(256)
    assert small.input == small.output == (12, 128)
    assert all(len(r.prompt) + r.params.max_tokens <= 256 for r in small.draw(50))
    with pytest.raises(SpecError, match="too short"):
        Workload().within(3)


def test_what_is_typed_becomes_a_workload() -> None:
    assert make_workload(16, "5:9", "7", 3, quick=False) == Workload(16, (5, 9), (7, 7), 3)
    quick = make_workload(256, "100:1024", "100:1024", 0, quick=True)
    assert (quick.requests, quick.input, quick.output) == (32, (12, 128), (12, 128))
    for text in ("x", "1:", ":2", "-1:4", "1:2:3"):
        with pytest.raises(SpecError, match="LOW:HIGH"):
            read_range(text, "--input")
    with pytest.raises(SpecError, match="1 ≤ LOW ≤ HIGH"):
        Workload(input=(5, 4))


# --- traces -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", max_batch_tokens=32, blocks=64)


def test_a_trace_accounts_for_every_token(llm: LLM) -> None:
    requests = [
        Request(list(range(n)), SamplingParams(temperature=0, max_tokens=m)) for n, m in ((40, 5), (7, 9), (3, 1))
    ]
    runner = llm.native.runner
    with traced(llm.native) as trace:
        for request in requests:
            llm.native.add(request)
        llm.native.run()
    assert llm.native.runner is runner
    assert sum(step.prompt_tokens for step in trace.steps) == 50
    assert sum(step.decoding for step in trace.steps) == (5 - 1) + (9 - 1)  # the first token comes with the prompt
    assert len(trace.inter_token_latencies()) == 4 + 8
    assert sum(trace.durations()) == pytest.approx(trace.seconds)
    assert all(seconds > 0 for seconds in trace.durations()) and 0 < trace.host_share(synchronous=True) < 1
    assert max(step.kv_use for step in trace.steps) == pytest.approx(
        5 / 64, abs=1 / 64
    )  # 40 + 7 + 3 tokens, blocks of 16


def test_step_times_are_of_full_batches_alone(llm: LLM) -> None:
    bench = EngineBench(llm.native)
    for batch in (1, 4):
        one = bench.step_time(batch, prompt=20)  # 4 prompts of 20 take three steps of 32 tokens
        assert one.batch == batch and 0 < one.seconds <= one.p99
        assert 20 < one.context < 40 and one.roofline == bench.roofline.seconds(batch, one.context)
    with pytest.raises(SpecError, match="never ran at once"):
        bench.step_time(16, prompt=60)  # 64 blocks


def test_a_request_that_is_refused_is_no_measurement() -> None:
    """A pool that holds some of the requests and not others would make a rate of the rest."""
    with (
        LLM("tiny", blocks=6) as small,
        pytest.raises(SpecError, match=r"benchmark failed: .* the pool has 6: .*blocks"),
    ):
        EngineBench(small.native).throughput(Workload(requests=8, input=(1, 60), output=(1, 60)))


def test_helpers() -> None:
    assert fit_to_context(10, 5, 100) == (10, 5) and fit_to_context(90, 30, 100) == (75, 25)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([], 0.5) == 0.0 and quantile([1.0, 9.0], 0.99) == 9.0


def test_every_figure_of_the_bench(llm: LLM) -> None:
    facts = bench_offline(llm.native, Workload(6), batches=(1, 8))
    requests = Workload(6).within(128).draw(320)
    assert facts["output_tokens"] == sum(r.params.max_tokens for r in requests)
    assert facts["input_tokens"] == sum(len(r.prompt) for r in requests)
    assert facts["output_tokens_per_s"] == pytest.approx(facts["output_tokens"] / facts["seconds"])
    assert facts["prefill_s"] + facts["decode_s"] == pytest.approx(facts["seconds"])
    assert set(facts["decode_ms"]) == set(facts["floors_ms"]) == {"1", "8"}
    assert 0 < facts["floor_ms"] == facts["floors_ms"]["1"] < facts["decode_ms"]["1"]
    assert 0 < facts["occupancy"] <= 1 and 0 < facts["kv_use"]["mean"] <= facts["kv_use"]["peak"] <= 1
    assert facts["preemptions"] == 0 and 0 <= facts["host_share"] <= 1


def test_the_page_stands_alone_and_shows_the_figures(llm: LLM) -> None:
    facts = {"model": "<tiny>", **profile_engine(llm.native, Workload(4), batches=(1, 2, 4))}
    text = engine_page(facts)
    assert "&lt;tiny&gt;" in text and "<tiny>" not in text
    assert not re.search(r"(src|href)=[\"']?http", text)
    for row in facts["batching"]:
        assert f"{row['ms']:.3f}" in text and row["gain"] == pytest.approx(
            row["tokens_per_s"] * facts["batching"][0]["ms"] / 1e3
        )
    shares = [facts["workload"]["prefill_s"], facts["workload"]["decode_s"]]
    assert f"<dd>{shares[0] / sum(shares):.0%}<small>" in text
