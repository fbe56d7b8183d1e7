"""The engine on one GPU: throughput, step times, start-up, quantisation and speculation, beside vLLM and the floor.

vLLM's figures were measured on one NVIDIA H200 (vLLM 0.22.1, FA3, CUDA graphs, compile) and are quoted, not run again.
The floor is the bytes that a step must read over the bandwidth of a device copy, measured in the same run.

    python benchmarks/engine_gpu.py                                          # everything
    python benchmarks/engine_gpu.py --only throughput,quant --model llama3-8b "qwen3-30b-a3b, 12 layers"
    python benchmarks/engine_gpu.py --only quant --case int4,fp8
    python benchmarks/engine_gpu.py --table

Results are kept in benchmarks/results/engine_gpu.json after each case; those that are not run keep what they had.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, commit, write_result

from lmworks.bench.engine import BATCHES, EngineBench, traced
from lmworks.bench.workload import Workload
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.quantization.quantized_model import apply_quantization
from lmworks.loading import LoadedModel, make_engine, random_model
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec

NAME = "engine_gpu"
PEER = json.loads((RESULTS / "vllm_h200.json").read_text())
VLLM = {name: sides["vllm"] for name, sides in PEER["models"].items()}
NO_PEER = {"output_tokens_per_s": math.nan, "decode_ms": {}}
MODELS = ("qwen3-0.6b", "llama3-8b", "qwen3-30b-a3b, 12 layers", "deepseek-v2-lite")


# As DeepSeek-V2-Lite, with experts in all layers.
DEEPSEEK = ModelSpec(
    layers=27, hidden=2048, heads=16, kv_heads=16, head_dim=128, vocab=102_400, context=32_768, kv_lora_rank=512,
    rope_head_dim=64, v_head_dim=128, experts=64, top_k=6, expert_ffn=1408, shared_experts=2, norm_topk=False,
)  # fmt: skip


def shape_of(name: str) -> ModelSpec:
    """A preset, or one of fewer layers; or a shape of this file."""
    if name == "deepseek-v2-lite":
        return DEEPSEEK
    preset, _, layers = name.partition(", ")
    shape = ModelSpec.from_preset(preset)
    return shape.replace(layers=int(layers.removesuffix(" layers"))) if layers else shape


SCHEMES = ("int8", "int4", "fp8")
GUESSERS, GUESSED = ("none", "ngram"), (1, 8)  # who guesses, and for how many at once
CONTEXT = 2048  # the longest request of the workload
LONG, LONGEST = 8_000, 131_000  # tokens of long prompts
PATIENCE_S = 120  # with one start-up

Case = tuple[str, dict[str, Any]]


def engine_of(name: str, scheme: str = "", **options: Any) -> Engine:
    """With random weights, quantised by plain rounding where a scheme is named: values do not change the time.

    Whoever makes another lets the last one go before, or the cache of that has less room.
    """
    gc.collect()
    torch.cuda.empty_cache()
    spec = EngineSpec(**{"context": CONTEXT, **options})
    shape = shape_of(name)
    shape = shape.replace(context=max(shape.context, spec.context))
    model = random_model(shape, torch.device("cuda"), torch.bfloat16, seed=0)
    if scheme:
        apply_quantization(model, scheme)
    return make_engine(LoadedModel(model, None), spec, seed=0)


def measured(engine: Engine, work: Workload | None = None) -> dict[str, Any]:
    """What `lmworks bench offline` measures; without a workload the steps alone."""
    bench = EngineBench(engine)
    warm_up_s = bench.warm_up()
    times = [bench.step_time(batch) for batch in BATCHES]
    facts = bench.throughput(work) if work else {}
    facts.pop("trace", None)
    return {
        **bench.describe(),
        **facts,
        "warm_up_s": warm_up_s,
        "decode_ms": {str(one.batch): 1e3 * one.seconds for one in times},
        "floors_ms": {str(one.batch): 1e3 * one.roofline for one in times},
    }


def throughput(name: str, _wanted: list[str]) -> Iterator[Case]:
    yield "bf16", measured(engine_of(name), Workload())


def kernels(name: str, _wanted: list[str]) -> Iterator[Case]:
    """Microseconds of each kernel of a decoding step of one sequence."""
    engine = engine_of(name)
    EngineBench(engine).warm_up()
    for batch in (1, 64):
        prompts = torch.randint(0, engine.runner.valid_vocab, (batch, 64)).tolist()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for prompt in prompts:
                engine.add(Request(prompt, SamplingParams(max_tokens=50, ignore_eos=True)))
            engine.run()
        rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
        for row in rows[:24]:
            print(f"{row.device_time_total / 49:9.1f} µs a step {row.count / 49:6.1f} × {row.key[:90]}", flush=True)
        yield f"batch {batch}", {row.key[:90]: row.device_time_total / 49 for row in rows[:24]}


def steps(name: str, _wanted: list[str]) -> Iterator[Case]:
    yield "bf16", measured(engine_of(name))


QUANT: dict[str, dict[str, Any]] = {
    **{scheme: {"scheme": scheme} for scheme in SCHEMES},
    "kv fp8": {"kv_dtype": "fp8"},
    "fp8 + kv fp8": {"scheme": "fp8", "kv_dtype": "fp8"},
}


def quant(name: str, wanted: list[str]) -> Iterator[Case]:
    for case in wanted or QUANT:
        yield case, measured(engine_of(name, **QUANT[case]), Workload())


ALONE = (30, 128, 500, 1000, 1900)  # tokens of prompts


def prompts(name: str, _wanted: list[str]) -> Iterator[Case]:
    """Milliseconds to the first token of a prompt that comes alone, the median of five behind four: steps launched
    kernel by kernel, and replayed; and of the first prompts of a size, which nothing has warmed up."""
    for graphs in (False, True):
        engine = engine_of(name, graph_prompts=graphs)
        first_tokens(engine, 10)  # libraries of the device are loaded
        times = {str(tokens): first_tokens(engine, tokens) for tokens in ALONE}
        del engine
        yield "replayed" if graphs else "launched", {size: statistics.median(each[4:]) for size, each in times.items()}
        if graphs:
            yield "replayed, the first three", {size: [round(ms, 2) for ms in each[:3]] for size, each in times.items()}


def long(name: str, _wanted: list[str]) -> Iterator[Case]:
    """32 prompts of 8,000 tokens at once, the second of two runs; and a prompt of 131,000 beside 16 that decode."""
    engine = engine_of(name, context=LONG + 192)
    bench, work = EngineBench(engine), Workload(32, (LONG, LONG), (128, 128))
    for seed in (1, 0):
        facts = throughput_of(bench, replace(work, seed=seed))
    yield "32 × 8,000", facts
    del engine, bench
    bench = EngineBench(engine_of(name, context=LONGEST + 1_000))
    yield "131,000 beside 16", {"alone_s": longest(bench, 0)["first_token_s"], **longest(bench, 16)}


def throughput_of(bench: EngineBench, work: Workload) -> dict[str, Any]:
    facts = bench.throughput(work)
    facts.pop("trace")
    return {**bench.describe(), **facts}


def longest(bench: EngineBench, decoding: int) -> dict[str, Any]:
    """Seconds to the first token of the longest prompt, and between the tokens of others meanwhile."""
    engine = bench.engine
    others = bench.requests([(1_000, 4_000)] * decoding)
    [prompt] = bench.requests([(LONGEST, 1)])
    with traced(engine) as trace:
        for request in others:
            engine.add(request)
        for _ in range(20 if others else 0):
            engine.step()
        engine.add(prompt)
        while not prompt.first_token_time:
            engine.step()
        for request in others:
            engine.cancel(request.id)
        engine.run()
    steps = [s for step, s in zip(trace.steps, trace.durations(), strict=True) if step.prompt_tokens]
    gaps = sorted(trace.inter_token_latencies())
    return {
        "first_token_s": prompt.first_token_time - prompt.arrival_time,
        "longest_step_s": max(steps),
        "steps": len(steps),
        "median_gap_s": gaps[len(gaps) // 2] if gaps else 0.0,
        "longest_gap_s": gaps[-1] if gaps else 0.0,
    }


def shared(name: str, _wanted: list[str]) -> Iterator[Case]:
    """256 requests that begin with the same 2,000 tokens, 100 of their own, all at once; the prefix is in no cache. The
    second of two runs: the first captures graphs."""
    bench = EngineBench(engine_of(name, context=2_304))
    for _ in range(2):
        requests = bench.requests([(2_100, 128)] * 256)
        for request in requests:
            request.prompt[:2_000] = requests[0].prompt[:2_000]
        trace = bench.run(requests)
    prompt_steps = [s for step, s in zip(trace.steps, trace.durations(), strict=True) if step.prompt_tokens]
    yield (
        "256 × (2,000 shared + 100)",
        {
            **bench.describe(),
            "seconds": trace.seconds,
            "output_tokens_per_s": 256 * 128 / trace.seconds,
            "prefill_s": sum(prompt_steps),
            "computed_prompt_tokens": sum(step.prompt_tokens for step in trace.steps),
        },
    )


def first_tokens(engine: Engine, tokens: int) -> list[float]:
    luck, times = torch.Generator().manual_seed(tokens), []
    for _ in range(9):
        prompt = torch.randint(0, engine.runner.valid_vocab, (tokens,), generator=luck).tolist()
        began = time.perf_counter()
        engine.add(Request(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        engine.run()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def spec(name: str, _wanted: list[str]) -> Iterator[Case]:
    """Greedy answers of random weights: those of qwen3-0.6b repeat themselves, those of llama3-8b do not."""
    for speculate in GUESSERS:
        engine = engine_of(name, speculate=speculate)
        EngineBench(engine).warm_up()
        for batch in GUESSED:
            for _ in range(2):  # what they meet first, and then with blocks that are cached, is not timed
                answer_greedily(engine, batch)
            yield f"{speculate}, batch {batch}", answer_greedily(engine, batch)
        del engine


def answer_greedily(engine: Engine, batch: int, tokens: int = 256) -> dict[str, float]:
    luck = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, engine.runner.valid_vocab, (batch, 64), generator=luck).tolist()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    before = engine.metrics.proposed_guesses, engine.metrics.accepted_guesses, engine.metrics.steps
    torch.cuda.synchronize()
    began = time.perf_counter()
    for prompt in prompts:
        engine.add(Request(prompt, params))
    engine.run()
    seconds = time.perf_counter() - began
    metrics = engine.metrics
    proposed, accepted = metrics.proposed_guesses - before[0], metrics.accepted_guesses - before[1]
    return {
        "output_tokens_per_s": batch * tokens / seconds,
        "ms_per_token": 1e3 * seconds / tokens,
        "steps": metrics.steps - before[2],
        "proposed": proposed,
        "acceptance": accepted / proposed if proposed else 0.0,
    }


# --- start-up: a process of its own, from its start to its first token ------------------------------------

FIRST_TOKEN = """
import json, sys
from lmworks.weight_prefetch import prefetch_weights
prefetch_weights(sys.argv[1])  # as the commands do it
from lmworks.cli.bench_inference import process_age
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.request import Request
from lmworks.engine.core.kernel_warmup import warm_up_kernels
from lmworks.loading import load, make_engine, pick_device, meta_model_of
from lmworks.spec import EngineSpec
import torch
ages = {"imported": process_age()}
spec = EngineSpec(context=2048)
with warm_up_kernels(meta_model_of(sys.argv[1]), spec, pick_device(spec)):  # as loading.load_engine does it
    loaded = load(sys.argv[1], spec, None, 0)
    torch.cuda.synchronize()
    ages["weights there"] = process_age()
engine = make_engine(loaded, spec, 0)
ages["engine ready"] = process_age()
engine.add(Request([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True)))
engine.run()
ages["first token"] = process_age()
print(json.dumps(ages), flush=True)
"""


def startup(name: str, _wanted: list[str]) -> Iterator[Case]:
    """Seconds from the start of a process. Cold: no compiled kernels, no weights in the page cache; warm: both."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("LMWORKS_BENCH_DISK")) as folder:
        weights = Path(folder) / "model"
        random_model(shape_of(name), torch.device("cuda"), torch.bfloat16, seed=0).save_hf(weights)
        gc.collect()
        torch.cuda.empty_cache()
        size = sum(file.stat().st_size for file in weights.iterdir())
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        for case in ("cold", "cold weights", "warm"):
            if case.startswith("cold"):
                forget(weights)
            began = time.time()
            child = subprocess.run(
                [sys.executable, "-X", "faulthandler", "-c", FIRST_TOKEN, str(weights)],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
            )
            if child.returncode:
                raise RuntimeError(f"start-up of {name} failed:\n{child.stderr[-2000:]}")
            ages = json.loads(child.stdout.splitlines()[-1])
            yield case, {"weights_gb": size / 1e9, **ages, **compiled(Path(folder) / "triton", began)}


def compiled(cache: Path, began: float) -> dict[str, float]:
    """Kernels of ours that were compiled since then, and how long after it the last of them was done."""
    times = [file.stat().st_mtime - began for file in cache.rglob("*.cubin")]
    new = [seconds for seconds in times if seconds > 0]
    return {"kernels compiled": len(new), "last of them": max(new, default=0.0)}


def forget(folder: Path) -> None:
    """Written back to the disk, and out of the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- all of it --------------------------------------------------------------------------------------------

PARTS = {
    "throughput": throughput, "steps": steps, "startup": startup, "quant": quant, "spec": spec, "prompts": prompts,
    "kernels": kernels, "long": long, "shared": shared,
}  # fmt: skip
USUAL = ("throughput", "startup", "quant", "spec", "prompts", "long", "shared")  # throughput measures the steps, too


def say(name: str, case: str, facts: dict[str, Any]) -> None:
    """One case in a line or two, beside vLLM's bf16."""
    if "decode_ms" not in facts:
        told = {key: round(value, 3) for key, value in facts.items() if isinstance(value, int | float)}
        told |= {key: value for key, value in facts.items() if isinstance(value, list)}
        print(f"{name} {case}: {json.dumps(told)}", flush=True)
        return
    peer = VLLM.get(name, NO_PEER)
    if "output_tokens_per_s" in facts:
        rate = facts["output_tokens_per_s"]
        print(
            f"{name} {case}: {rate:,.0f} output tokens/s, {rate / peer['output_tokens_per_s']:.2f}× vLLM; "
            f"prefill {facts['prefill_s']:.1f} s (longest step {facts['longest_prefill_step_s']:.2f}), "
            f"decode {facts['decode_s']:.1f} s (floor {facts['floor_s']:.1f}); "
            f"host {facts['host_share']:.0%}, batch {facts['mean_batch']:.0f}, preempted {facts['preemptions']}, "
            f"KV {facts['kv_use']['peak']:.0%}; met first: {facts['first_times']}; power: {facts['power']}",
            flush=True,
        )
    times = ", ".join(
        f"{batch}: {ms:.2f} (floor {facts['floors_ms'][batch]:.2f}, vLLM {peer['decode_ms'].get(batch, '–')})"
        for batch, ms in facts["decode_ms"].items()
    )
    print(f"{name} {case}: ms a step at batch {times}; warm-up {facts['warm_up_s']:.1f} s", flush=True)


def markdown(models: dict[str, Any]) -> str:
    """The tables of docs/engine.md, docs/quantization.md and docs/speculation.md."""
    lines = [
        "| model | | output tokens/s | batch 1, ms (floor) | batch 8 | batch 64 |",
        "|---|---|---|---|---|---|",
    ]
    for name, parts in models.items():
        peer = VLLM.get(name, NO_PEER)
        times = (peer["decode_ms"].get(str(batch)) for batch in BATCHES)
        quoted = " | ".join("" if ms is None else f"{ms:.2f}" for ms in times)
        lines.append(f"| {name} | vLLM bf16, quoted | {peer['output_tokens_per_s']:,} | {quoted} |")
        for case, facts in {**parts.get("throughput", {}), **parts.get("quant", {})}.items():
            rate = facts["output_tokens_per_s"]
            times = " | ".join(
                f"{facts['decode_ms'][str(batch)]:.2f} ({facts['floors_ms'][str(batch)]:.2f})" for batch in BATCHES
            )
            lines.append(f"| | {case} | {rate:,.0f} ({rate / peer['output_tokens_per_s']:.2f}×) | {times} |")
    lines += [
        "",
        "| model | start-up | imported | weights there | engine ready | first token |",
        "|---|---|---|---|---|---|",
    ]
    for name, parts in models.items():
        lines.append(f"| {name} | vLLM, quoted | | | | {'–'.join(map(str, PEER['startup_s']['vllm']))} s |")
        for case, ages in parts.get("startup", {}).items():
            told = " | ".join(
                f"{ages[key]:.1f} s" for key in ("imported", "weights there", "engine ready", "first token")
            )
            lines.append(f"| | {case} | {told} |")
    lines += [
        "",
        "| model | greedy answers | ms a token | output tokens/s | steps | accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name, parts in models.items():
        for case in (f"{speculate}, batch {batch}" for batch in GUESSED for speculate in GUESSERS):
            if facts := parts.get("spec", {}).get(case):
                rates = f"{facts['ms_per_token']:.2f} | {facts['output_tokens_per_s']:,.0f}"
                lines.append(f"| {name} | {case} | {rates} | {facts['steps']} | {facts['acceptance']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(USUAL), help=f"parts, with commas between them: {', '.join(PARTS)}")
    parser.add_argument("--case", default="", help=f"of quant: some of {', '.join(QUANT)}")
    parser.add_argument("--model", default=MODELS, nargs="+", help="presets, or 'qwen3-30b-a3b, 12 layers'")
    parser.add_argument("--table", action="store_true", help="print what was kept as tables of Markdown")
    chosen = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    models = json.loads(path.read_text()).get("models", {}) if path.exists() else {}
    if chosen.table:
        print(markdown(models))
        return
    wanted = [case for case in chosen.case.split(",") if case]
    if unknown := [case for case in wanted if case not in QUANT]:
        parser.error(f"--case: there is no {', '.join(unknown)}; use some of {', '.join(QUANT)}")
    for name in chosen.model:
        kept = models.setdefault(name, {})
        for part in chosen.only.split(","):
            began = time.perf_counter()
            try:
                for case, facts in PARTS[part](name, wanted):
                    say(name, case, facts)
                    kept.setdefault(part, {})[case] = {**facts, "commit": commit()}
                    write_result(NAME, {"models": models})
            except (RuntimeError, LMWorksError, subprocess.TimeoutExpired) as error:  # the other parts are worth having
                print(f"{name} {part} failed: {error}", flush=True)
            print(f"  [{part} took {time.perf_counter() - began:.0f} s]", flush=True)
    print(path)


if __name__ == "__main__":
    main()
