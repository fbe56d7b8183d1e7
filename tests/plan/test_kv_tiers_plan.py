"""When tiers pay: the formulas by hand, their limits, and the measured latency of a hit against that of computing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.plan.serving.batching import Lengths, steady
from lmworks.plan.serving.inference import Deployment, Rates
from lmworks.plan.serving.kv_tiers import (
    BLOCK,
    Link,
    break_even,
    fetch_seconds,
    fitted_line,
    links_of,
    prefill_seconds,
    saved_seconds,
    split,
)
from lmworks.plan.serving.served_model import ServedModel
from lmworks.spec import ModelSpec, SpecError, catalogue

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "kv_tiers.json"
LLAMA = ServedModel.of(ModelSpec.from_preset("llama3-8b"), "llama3-8b")


def deployment(gpu: str = "H100-SXM-80GB", kv: str = "bf16", tp: int = 1, served: ServedModel = LLAMA) -> Deployment:
    return Deployment(served, catalogue()[gpu], Rates.of("vllm"), tp, kv=kv)


def test_bytes_and_links_by_hand() -> None:
    """Llama 3 8B: 32 layers, 8 heads of 128, keys and values of 2 bytes."""
    one = deployment()
    assert one.cache.token_bytes == 32 * 8 * 128 * 2 * 2
    host, disk, shared, peer = links_of(one, 2.0, 50.0, 64.0)
    assert host.bandwidth == 64e9
    assert disk.bandwidth == pytest.approx(1 / (1 / 2e9 + 1 / 64e9)) and disk.latency == pytest.approx(250e-6)
    assert shared.bandwidth == pytest.approx(1 / (1 / 1.2e9 + 1 / 64e9))  # as fast as checksums are
    assert peer.bandwidth == pytest.approx(1 / (1 / 1.4e9 + 1 / 64e9))
    assert fetch_seconds(host, 131072, 1000) == pytest.approx(50e-6 + 131072e3 / 64e9)
    assert links_of(one, 50.0, 50.0)[0].bandwidth == pytest.approx(0.7 * 64e9)
    slow = links_of(one, 50.0, 0.5, 64.0)
    assert slow[1].bandwidth == pytest.approx(1 / (1 / 2.4e9 + 1 / 64e9))
    assert slow[2].bandwidth == slow[3].bandwidth == pytest.approx(1 / (1 / 0.5e9 + 1 / 64e9))


def test_times_of_hits_are_those_measured_on_an_h200() -> None:
    """Llama 3.2 3B, from 4,096 tokens on: a hit in a tier less one on the device, and computing."""
    measured = json.loads(RESULT.read_text(encoding="utf-8"))
    served = ServedModel.of(ModelSpec.from_preset(measured["model"]), measured["model"])
    one = Deployment(served, catalogue()["H200-SXM-141GB"], Rates.of("vllm"))
    links = {link.name: link for link in links_of(one, 50.0, 50.0)}
    tiers = {"disk": "disk", "shared folder": "disk", "prefill engine": "peer", "kv-store": "shared"}
    first, last = measured["rows"][-2:]
    tokens = last["tokens"] - first["tokens"]
    for tier, link in {"host": "host", **tiers}.items():
        found = last[tier] - first[tier]  # between two lengths: without what every request takes
        assert tokens * one.cache.token_bytes / links[link].bandwidth == pytest.approx(found, rel=0.1)
    for row in (first, last):
        assert prefill_seconds(one, row["tokens"]) == pytest.approx(row["computed"], rel=0.2)


def test_ranks_share_the_disk_and_not_the_bus() -> None:
    """Four ranks have two heads each; with latent attention, all have the same vectors."""
    host, disk, *_ = links_of(four := deployment(tp=4), 5.0, 50.0, 64.0)
    assert four.cache.token_bytes == 131072 / 4
    assert fetch_seconds(host, four.cache.token_bytes, 1000) == pytest.approx(50e-6 + 32768e3 / 64e9)
    assert fetch_seconds(disk, four.cache.token_bytes, 1000) == pytest.approx(250e-6 + 131072e3 / 5e9 + 32768e3 / 64e9)
    latent = ServedModel.of(ModelSpec.from_preset("llama3-8b", kv_heads=32, kv_lora_rank=512, rope_head_dim=64), "")
    assert links_of(deployment(tp=4, served=latent), 5.0, 50.0) == links_of(deployment(), 5.0, 50.0)


def test_break_even_is_where_both_sides_are_equal() -> None:
    one = deployment()
    for bandwidth, latency in ((64e9, 50e-6), (5e9, 1e-3), (64e9, 50e-3)):
        link = Link("x", latency, bandwidth)
        found = break_even(one, link)
        assert found is not None and found % BLOCK == 0
        for tokens, pays in ((found, True), (found + 10 * BLOCK, True), (found - BLOCK, False)):
            if tokens:
                assert (fetch_seconds(link, 131072, tokens) < saved_seconds(one, tokens)) is pays


def test_break_even_moves_as_it_must() -> None:
    """Slower links and longer latencies pay later, fewer bytes earlier; a link that is too slow never does."""
    one, found = deployment(), []
    for latency in (1e-4, 1e-3, 1e-2, 1e-1):
        found.append(break_even(one, Link("x", latency, 64e9)) or 0)
    assert found == sorted(found) and found[-1] > 10 * found[0]
    slow = Link("x", 1e-3, 4.6e9)
    full, half = break_even(one, slow), break_even(deployment(kv="fp8"), slow)
    assert half is not None and (full is None or half < full)
    assert break_even(one, Link("x", 1e-3, 1e8)) is None
    with pytest.raises(SpecError, match="the bandwidth of disk is not known"):
        Link("disk", 0.0, 0.0).then(slow)


def test_prefill_apart_by_hand() -> None:
    one, lengths, link = deployment(), Lengths(4096, 256), Link("peer", 1e-3, 28e9)
    found = split(one, lengths, 0.05, link, 512)
    assert found is not None
    at = steady(one, lengths, found.mixed_batch)
    assert found.mixed_tpot == pytest.approx(at.tpot) and at.tpot <= 0.05
    assert steady(one, lengths, found.mixed_batch + 1).tpot > 0.05
    assert found.mixed_seconds == pytest.approx(256 * at.tpot / found.mixed_batch)
    decode = float(steady(one, lengths, found.split_batch).decode)
    assert found.split_seconds == pytest.approx(256 * decode / found.split_batch + prefill_seconds(one, 4096))
    assert found.split_batch > found.mixed_batch and found.transfer == pytest.approx(1e-3 + 4096 * 131072 / 28e9)
    assert split(one, lengths, 1e-4, link, 512) is None


def test_command_prints_what_it_computes() -> None:
    words = ["plan", "kv-tiers", "llama3-8b", "--gpu", "h100", "--input", "8192", "--network-gbs", "0.1"]
    told = CliRunner().invoke(app, [*words, "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    tiers = {each["tier"]: each for each in found["tiers"]}
    assert list(tiers) == ["host", "disk", "shared", "peer"] and found["token_bytes"] == 131072
    assert tiers["host"]["break_even_tokens"] < 1000 and tiers["shared"]["break_even_tokens"] is None
    assert found["prefill_apart"]["transfer"] > 8192 * 131072 / 0.1e9
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "never" in shown.output and "prefill apart from decode" in shown.output


@pytest.mark.slow
def test_latency_of_a_hit_is_predicted_from_shorter_ones() -> None:
    """On this machine: constants of the formula from three lengths, the ratio of hit and computing at a fourth."""
    from lmworks.engine.core.engine import Engine
    from lmworks.engine.core.model_runner import ModelRunner
    from lmworks.engine.core.request import Request
    from lmworks.engine.core.sampling_params import SamplingParams
    from lmworks.engine.kv_tiers.open import open_tiers
    from lmworks.model import GPT
    from lmworks.spec import EngineSpec

    model = ModelSpec(layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=256, context=4096)
    spec = EngineSpec(device="cpu", dtype="fp32", blocks=512, max_seqs=2, context=2100, kv_host_gib=0.25)
    runner = ModelRunner(GPT(model, seed=0).eval(), spec, "cpu", 256)
    engine, chance = Engine(runner, tiers=open_tiers(runner)), torch.Generator().manual_seed(0)

    def first_token(prompt: list[int]) -> float:
        begin = time.perf_counter()
        engine.add(Request(list(prompt), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        engine.run()
        return time.perf_counter() - begin

    computed, hit = {}, {}
    for length in (256, 512, 1024, 2048):
        both = []
        for _ in range(7):
            prompt = torch.randint(256, (length,), generator=chance).tolist()
            compute = first_token(prompt)
            engine.scheduler.block_manager.reset_prefix_cache()
            both.append((compute, first_token(prompt)))
        computed[length], hit[length] = (min(each) for each in zip(*both, strict=True))
    known = (256, 512, 1024)
    latency, a_token = fitted_line([(length, hit[length]) for length in known])
    # A token costs more behind others, for attention: P(n) / n is a line, too.
    first, a_token_before = fitted_line([(length, computed[length] / length) for length in known])
    predicted = 2048 * (first + a_token_before * 2048) / (latency + a_token * 2048)
    measured = computed[2048] / hit[2048]
    assert measured > 3
    assert 0.5 < predicted / measured < 2  # other programs run beside it
