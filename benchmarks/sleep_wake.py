"""Seconds in which an engine gives the memory of its KV cache back and takes it again, and what that leaves unchanged.

Random weights, a cache of a given size. Every round: 64 answers, sleep, a trainer's allocations in the same memory,
wake. Two kinds of cache: at reserved addresses (`sleepable=True`), and freed and allocated again by torch, whose CUDA
graphs have to be captured again where it has moved. Waking writes zeros to the whole cache: its floor is the bytes over
the bandwidth of a copy.

    python benchmarks/sleep_wake.py --save                                     # llama3-1b, 40 GB, on a GPU
    python benchmarks/sleep_wake.py --model tiny --gb 0.05 --rounds 3          # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from common import write_result

from lmworks.bench.roofline import measure_bandwidth
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.kv_cache import KVCacheShape
from lmworks.engine.core.model_runner import DTYPES, ModelRunner, resolve_spec
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.sleep import resident_memory
from lmworks.loading import random_model
from lmworks.spec import EngineSpec, ModelSpec

SEQS, PROMPT, ANSWER = 64, 96, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-1b", help="preset")
    parser.add_argument("--gb", type=float, default=40.0, help="size of the KV cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/sleep_wake.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {}
    for name, sleepable in (("reserved addresses", True), ("allocated again", False)):
        cases[name] = measure(make_engine(options.model, device, options.gb, sleepable), options.rounds)
        print(name, json.dumps(cases[name], indent=1))
    bandwidth = measure_bandwidth(device)
    result = {
        "model": options.model,
        "rounds": options.rounds,
        "copy_bandwidth": bandwidth,
        "wake_floor_s": cases["reserved addresses"]["cache_bytes"] / bandwidth,
        "cases": cases,
    }
    if options.save:
        print(write_result("sleep_wake", result))


def make_engine(name: str, device: torch.device, gb: float, sleepable: bool) -> Engine:
    gc.collect()  # the engine before
    model = ModelSpec.from_preset(name)
    context = PROMPT + ANSWER
    spec = resolve_spec(EngineSpec(device=device.type, context=context, max_seqs=SEQS), model, device)
    dtype = DTYPES[spec.dtype]
    blocks = int(gb * 1e9) // KVCacheShape.of(model, spec, dtype).block_bytes
    weights = random_model(model, device, dtype, seed=0)
    return Engine(ModelRunner(weights, spec.replace(blocks=blocks), device, model.vocab, sleepable=sleepable), seed=0)


def measure(engine: Engine, rounds: int) -> dict[str, Any]:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    device, cache_bytes = runner.device, runner.blocks * runner.cache.shape.block_bytes
    for _ in range(3):  # compiles kernels, captures graphs
        want, _ = answers(engine)
        engine.weights_changed()
    times: list[tuple[float, float, float]] = []
    released, freed, reserved, equal = 0, 0, [], 0
    for _ in range(rounds):
        before = free_bytes(device)
        began = time.perf_counter()
        released = engine.sleep()
        slept = time.perf_counter()
        freed = free_bytes(device) - before
        update = torch.ones(cache_bytes // 4 // 2, device=device)  # half of what the cache had
        synchronize(device)
        del update
        resumed = time.perf_counter()
        engine.wake()
        synchronize(device)
        woken = time.perf_counter()
        found, seconds = answers(engine)
        equal += found == want
        times.append((slept - began, woken - resumed, seconds))
        reserved.append(torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)
    sleep_s, wake_s, answers_s = zip(*times, strict=True)
    return {
        "cache_bytes": cache_bytes,
        "released_bytes": released,
        "device_free_rose_by": freed,
        "sleep_s": spread(sleep_s),
        "wake_s": spread(wake_s),
        "answers_s": spread(answers_s),
        "equal_rounds": equal,
        "graphs": 0 if runner.graphs is None else len(runner.graphs.captured),
        "graph_recaptures": engine.metrics.graph_recaptures,
        "reserved_bytes": {"first": reserved[0], "last": reserved[-1], "max": max(reserved)},
        "kept_bytes": resident_memory(runner),
    }


def answers(engine: Engine) -> tuple[list[list[int]], float]:
    """Greedy, to the same prompts every time."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, engine.runner.valid_vocab, (SEQS, PROMPT), generator=draw).tolist()
    requests = [Request(each, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)) for each in prompts]
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    done = {delta.request.id: delta.result for delta in engine.run()}
    found = [done[request.id] for request in requests]
    return [each.token_ids for each in found if each is not None], time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def spread(seconds: tuple[float, ...]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


if __name__ == "__main__":
    main()
