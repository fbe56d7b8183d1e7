"""Hours of post-training by phase: against the parts they are made of, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.eager import chunked_cross_entropy, logprobs
from lmworks.plan.ops import Workload
from lmworks.plan.round_time import Answers, generate_seconds, run_time, update_seconds
from lmworks.plan.serving.inference import Deployment, Rates
from lmworks.plan.serving.served_model import ServedModel
from lmworks.plan.step.price import price
from lmworks.spec import Gpu, RunSpec, load_run

BF16 = ["precision.dtype=bf16", "precision.weights=bf16", "cluster.gpu=H200-SXM-141GB", "data.seq=1024"]
ONLINE = ["align.method=grpo", 'align.rewards=["exact"]', "align.prompts=64", "align.samples=4"]


def spec_of(*overrides: str) -> RunSpec:
    return load_run("llama3-1b", [*BF16, *overrides])


def gpu_of(spec: RunSpec) -> Gpu:
    assert spec.cluster.accelerator is not None
    return spec.cluster.accelerator


def phases(*overrides: str, mean: float = 0.0) -> dict[tuple[str, str], float]:
    spec = spec_of(*overrides)
    return {(one.phase, one.model): one.seconds for one in run_time(spec, gpu_of(spec), mean).phases}


@pytest.mark.parametrize(("mean", "longest"), [(256, 512), (20, 512), (500, 512), (512, 512)])
def test_answers_have_the_mean_that_was_asked_for(mean: float, longest: int) -> None:
    running = Answers(8, 4, 100, mean, longest).running()
    assert running[0] == 1 and np.all(np.diff(running) <= 0)
    assert running.sum() == pytest.approx(mean, rel=0.03)


def test_generation_is_prompts_once_and_a_step_for_every_token() -> None:
    spec = spec_of()
    engine = Deployment(ServedModel.of(spec.model), gpu_of(spec), Rates.of("vllm"))
    found = generate_seconds(engine, Answers(8, 4, 100, 16, 16), 32)
    steps = [float(engine.step(decode=32, context=100 + token)) for token in range(16)]
    assert found == pytest.approx(float(engine.step(prefill=800, prompts=8)) + sum(steps))
    assert generate_seconds(engine, Answers(8, 4, 100, 16, 16), 16) > 1.5 * sum(steps)  # two waves


def test_a_preference_step_is_a_training_step_over_both_rows_and_a_forward_pass() -> None:
    found = phases("align.method=dpo", "data.micro_batch=2")
    spec = spec_of("data.micro_batch=4")
    plain = float(price(Case.of(spec, gpu_of(spec))).seconds)
    assert found[("update", "policy")] == pytest.approx(plain, rel=0.1)  # the head is computed again
    assert found[("score", "reference")] == pytest.approx(plain / 3, rel=0.2)


def test_frozen_weights_need_no_gradients() -> None:
    """One adapter on the narrowest layer: two of three products are left, and what it moves; of the update nothing."""
    full, keys = (spec_of(*words) for words in ((), ("lora.rank=1", 'lora.targets=["attention.k"]')))
    parts = [price(Case.of(spec, gpu_of(spec))).parts for spec in (full, keys)]
    assert parts[1]["matmul"] / parts[0]["matmul"] == pytest.approx(2 / 3, rel=0.06)
    assert parts[1]["optimizer"] < 1e-3 * parts[0]["optimizer"]


def test_adapters_cost_what_they_read_and_write() -> None:
    """Of all layers more than of one, over 4 bits more than over 16, and with DoRA more than without."""
    words = ('lora.targets=["attention"]',), (), ("lora.base=nf4",), ("lora.dora=true", "lora.base=nf4")
    specs = [spec_of("align.method=dpo", "lora.rank=16", *more) for more in words]
    found = [update_seconds(Case.of(spec, gpu_of(spec))) for spec in specs]
    assert found == sorted(found)
    full = spec_of("align.method=dpo")
    assert found[1] < update_seconds(Case.of(full, gpu_of(full)))
    wide, narrow = (price(Case.of(spec, gpu_of(spec))) for spec in (specs[1], full))
    assert wide.notes == ("no run with low-rank adapters was fitted: the interval is wider",) and not narrow.notes


def test_log_probabilities_cost_one_product_more() -> None:
    load = Workload(spec_of().model, 4, 1024, "bf16", "cuda")
    ways = [[kernel for op in head(load) for way in (op.forward, op.backward) for kernel in way]
            for head in (chunked_cross_entropy, logprobs)]  # fmt: skip
    flops = [sum(kernel.count * kernel.flops for kernel in kernels if kernel.kind == "gemm") for kernels in ways]
    assert flops[1] / flops[0] == pytest.approx(4 / 3)


def test_phases_of_a_round() -> None:
    found = phases(*ONLINE, "align.beta=0.04", "data.global_batch=128", "align.max_tokens=512", mean=256)
    assert list(found) == [("generate", "policy"), ("score", "policy"), ("score", "reference"), ("update", "policy")]
    whole = phases(*ONLINE, "align.beta=0.04", "data.global_batch=128", "align.max_tokens=512")
    assert all(whole[key] > found[key] for key in found)
    once = phases(*ONLINE, "data.global_batch=256", "align.max_tokens=512", mean=256)
    assert list(once) == [("generate", "policy"), ("update", "policy")]


def test_rounds_and_dollars() -> None:
    spec = spec_of(*ONLINE, "data.global_batch=128", "optim.steps=100", "cluster.price_hour=2.5")
    found = run_time(spec, gpu_of(spec))
    assert found.rounds == 50  # of two steps
    assert found.dollars == pytest.approx(2.5 * 50 * found.seconds / 3600)


def test_a_hand_over_takes_its_messages_and_a_copy() -> None:
    sharded = [*ONLINE, "data.global_batch=256", "align.max_tokens=512", "parallel.dp=8", "parallel.strategy=fsdp2",
               "cluster.gpus_per_node=8"]  # fmt: skip
    found = [phases(*sharded, f"align.engine_tp={tp}")[("hand over", "policy")] for tp in (1, 8)]
    spec = spec_of(*sharded)
    copied = 2 * 2 * spec.model.params / (gpu_of(spec).bandwidth_gbs * 1e9)
    links = 2 * spec.model.params * 7 / 8 / (gpu_of(spec).link_gbs * 1e9)
    assert copied + links < found[0] < 10 * (copied + links)  # 450 GB/s is not reached by messages of one weight
    assert copied / 8 < found[1] < found[0] / 2
    assert ("hand over", "policy") not in phases(*ONLINE, "data.global_batch=256")  # the trainer's own tensors
