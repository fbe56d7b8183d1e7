"""Offline throughput and latency of an engine beside the memory roofline: `lmworks bench offline`. Every step is traced
by a thin wrapper around the model runner.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch

from ..engine.core.engine import Engine, RunnerProtocol
from ..engine.core.kernel_warmup import prompt_lengths
from ..engine.core.model_runner import ModelRunner
from ..engine.core.request import Request
from ..engine.core.request import Sequence as EngineSequence
from ..engine.core.sampling_params import SamplingParams
from ..engine.core.scheduler import Chunk, Step
from ..record.formatting import binary_bytes
from ..spec import SpecError
from .power import monitor_power
from .roofline import DecodeRoofline, measure_bandwidth
from .workload import Workload


@dataclass
class StepRecord:
    """One step, in seconds of the performance counter."""

    chunks: list[Chunk]
    launched: float  # when its launch began
    launch: float  # how long that took
    waited: float = 0.0  # for its tokens
    ended: float = 0.0  # when the tokens were read
    kv_use: float = 0.0  # used share of the KV blocks

    @property
    def prompt_tokens(self) -> int:
        """Includes tokens recomputed after a preemption."""
        return sum(chunk.count for chunk in self.chunks if not decodes(chunk))

    @property
    def decoding(self) -> int:
        """Number of decoding sequences."""
        return sum(decodes(chunk) for chunk in self.chunks)


def decodes(chunk: Chunk) -> bool:
    return chunk.start >= chunk.sequence.num_prompt_tokens and chunk.num_logits == chunk.count


@dataclass
class Trace:
    began: float = field(default_factory=time.perf_counter)
    steps: list[StepRecord] = field(default_factory=list)

    def durations(self) -> list[float]:
        """Seconds of each step, from the end of the previous one: the device works without gaps."""
        ends = [self.began, *(step.ended for step in self.steps)]
        return [end - before for before, end in pairwise(ends)]

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended - self.began if self.steps else 0.0

    def inter_token_latencies(self) -> list[float]:
        """Seconds between consecutive tokens of an answer; several tokens of one step count once."""
        latest: dict[EngineSequence, float] = {}
        gaps = []
        for step in self.steps:
            for chunk in step.chunks:
                if chunk.num_logits:
                    if (before := latest.get(chunk.sequence)) is not None:
                        gaps.append(step.ended - before)
                    latest[chunk.sequence] = step.ended
        return gaps

    def host_share(self, synchronous: bool) -> float:
        """Share of the time in which the host neither computed nor waited for the device.

        On a CPU a launch computes, so launches are device time. On a GPU host work overlaps with the device, and a
        share near 1 means that the device waits for the host.
        """
        device = sum(step.launch if synchronous else step.waited for step in self.steps)
        return 1 - device / self.seconds if self.seconds else 0.0


class TracedRunner:
    """A model runner with timing; everything else is delegated."""

    def __init__(self, inner: RunnerProtocol, engine: Engine, trace: Trace) -> None:
        self.inner, self.engine, self.trace = inner, engine, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, step: Step) -> Any:
        began = time.perf_counter()
        launched = self.inner.launch(step)
        record = StepRecord(step.chunks, began, time.perf_counter() - began)
        blocks = self.engine.scheduler.block_manager
        record.kv_use = blocks.num_used_blocks / len(blocks.ref_counts)
        self.trace.steps.append(record)
        return TracedStep(launched, record)


class TracedStep:
    def __init__(self, inner: Any, record: StepRecord) -> None:
        self.inner, self.record = inner, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self) -> Any:
        began = time.perf_counter()
        tokens = self.inner.read()
        self.record.ended = time.perf_counter()
        self.record.waited = self.record.ended - began
        return tokens


@contextmanager
def traced(engine: Engine) -> Iterator[Trace]:
    """Trace all steps of the engine in the block; it must be idle before and after."""
    trace, inner = Trace(), engine.runner
    engine.runner = cast(RunnerProtocol, TracedRunner(inner, engine, trace))
    try:
        yield trace
    finally:
        engine.runner = inner


# --- the benchmark ---------------------------------------------------------------------------------------


BATCHES = (1, 8, 64)
PROMPT = 128  # tokens of the prompts before the timed steps
STEPS = {"cuda": 56, "cpu": 10}  # of each batch size, of which
WARMUP_STEPS = {"cuda": 8, "cpu": 2}  # are not counted: kernels are compiled, graphs captured


@dataclass(frozen=True)
class StepTime:
    """Decoding steps of one batch size; `context`: mean length of a sequence."""

    batch: int
    context: float
    seconds: float  # the median
    p99: float
    roofline: float

    def to_dict(self) -> dict[str, float]:
        rate = self.batch / self.seconds
        times = {"ms": 1e3 * self.seconds, "p99_ms": 1e3 * self.p99, "floor_ms": 1e3 * self.roofline}
        return {"batch": self.batch, "context": self.context, **times, "tokens_per_s": rate}


class EngineBench:
    """Benchmarks an engine that has no other load."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        assert isinstance(engine.runner, ModelRunner), "an engine is measured with its own runner"
        self.engine, self.runner, self.seed = engine, engine.runner, seed
        self.roofline = DecodeRoofline(
            self.runner.model, self.runner.cache.shape, measure_bandwidth(self.runner.device)
        )

    # --- single batches -----------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> Trace:
        with traced(self.engine) as trace:
            for request in requests:
                self.engine.add(request)
            results = [piece.result for piece in self.engine.run()]
        if wrong := next((result.error for result in results if result is not None and result.error), None):
            raise SpecError(f"a request of the benchmark failed: {wrong}")
        return trace

    def requests(self, lengths: Sequence[tuple[int, int]]) -> list[Request]:
        """Requests of random ids with (prompt, answer) tokens. Every call has another seed: no prefix cache hits."""
        self.seed += 1
        rng = torch.Generator().manual_seed(self.seed)
        requests = []
        for prompt, answer in lengths:
            ids = torch.randint(0, self.runner.valid_vocab, (prompt,), generator=rng).tolist()
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=answer, seed=self.seed)
            requests.append(Request(ids, params))
        return requests

    def warm_up(self) -> float:
        """Every batch size and prompts for all kernels, so that compilation and graph capture are not timed; and long
        prompts over two steps, so that prefill and decoding mix."""
        began, spec = time.perf_counter(), self.engine.spec
        gpu = self.runner.device.type == "cuda"
        short = max(1, min(8, spec.context // 2))
        self.run(self.requests([(short, 3 + place // 4) for place in range(spec.max_seqs if gpu else 1)]))
        if gpu:
            for length in prompt_lengths(spec, self.runner.model.spec.experts > 0):
                self.run(self.requests([(length, 1)]))
            long = min(spec.context, spec.max_batch_tokens, self.runner.blocks * spec.block) // 2
            self.run(self.requests([(long, 4)] * (2 * spec.max_batch_tokens // long + 1)))
        return time.perf_counter() - began

    def step_time(self, batch: int, prompt: int = 0) -> StepTime:
        """Decoding of `batch` sequences; prompts are by default as long as one step can prefill."""
        kind, budget = self.runner.device.type, self.engine.spec.max_batch_tokens
        prompt = prompt or max(1, min(PROMPT, budget // batch))
        meanwhile = math.ceil(batch * prompt / budget)  # steps in which some sequences decode and others prefill
        prompt, steps = fit_to_context(prompt, meanwhile + STEPS[kind], self.engine.spec.context)
        trace = self.run(self.requests([(prompt, steps)] * batch))
        full = [
            seconds
            for step, seconds in zip(trace.steps, trace.durations(), strict=True)
            if len(step.chunks) == batch == step.decoding
        ]
        if not full:
            raise SpecError(
                f"{batch} sequences of {prompt + steps} tokens never ran at once: the pool has only "
                f"{self.runner.blocks} blocks of {self.engine.spec.block} tokens; raise engine.blocks, or lower "
                "engine.max_seqs"
            )
        counted = full[WARMUP_STEPS[kind] :] or full
        context = prompt + steps - len(counted) / 2
        p99 = quantile(counted, 0.99)
        return StepTime(batch, context, statistics.median(counted), p99, self.roofline.seconds(batch, context))

    def prefill_rate(self, tokens: int) -> float:
        """Prefill throughput in tokens/s, with `tokens` per step."""
        prompt, _ = fit_to_context(tokens, 1, self.engine.spec.context)
        trace = self.run(self.requests([(prompt, 1)] * max(1, tokens // prompt) * 3))
        steps = [(step.prompt_tokens, s) for step, s in zip(trace.steps, trace.durations(), strict=True)]
        return max(count / seconds for count, seconds in steps)

    # --- throughput ---------------------------------------------------------------------------------------

    def throughput(self, workload: Workload) -> dict[str, Any]:
        """The workload, all requests at once. `prefill_s`: time of steps with any prefill."""
        fitted = workload.within(self.engine.spec.context)
        requests = fitted.draw(self.runner.valid_vocab)
        before = self.engine.metrics.num_preemptions
        with monitor_power(self.runner.device) as power, self.first_times() as first_times:
            trace = self.run(requests)
        durations = trace.durations()
        prompts = [s for step, s in zip(trace.steps, durations, strict=True) if step.prompt_tokens]
        decode = [step for step in trace.steps if not step.prompt_tokens]
        answers = sum(len(sequence.output_token_ids) for request in requests for sequence in request.sequences)
        gaps = trace.inter_token_latencies()
        first = sorted(request.first_token_time - request.arrival_time for request in requests)
        rows = statistics.fmean(step.decoding for step in decode) if decode else 0.0
        return {
            "requests": fitted.requests,
            "input": list(fitted.input),
            "output": list(fitted.output),
            "input_tokens": sum(len(request.prompt) for request in requests),
            "output_tokens": answers,
            "seconds": trace.seconds,
            "output_tokens_per_s": answers / trace.seconds,
            "prefill_s": sum(prompts),
            "decode_s": sum(durations) - sum(prompts),
            "prompt_tokens_per_s": sum(step.prompt_tokens for step in trace.steps) / (sum(prompts) or 1.0),
            "longest_prefill_step_s": max(prompts, default=0.0),
            "first_times": first_times,
            "power": power.between(trace.began, trace.began + trace.seconds),
            "steps": len(trace.steps),
            "prefill_steps": len(prompts),
            "mean_batch": rows,
            "occupancy": rows / min(self.engine.spec.max_seqs, fitted.requests),
            "kv_use": {
                "mean": statistics.fmean(step.kv_use for step in trace.steps),
                "peak": max(step.kv_use for step in trace.steps),
                "blocks": self.runner.blocks,
                "bytes": self.runner.blocks * self.runner.cache.shape.block_bytes,
            },
            "preemptions": self.engine.metrics.num_preemptions - before,
            "host_share": trace.host_share(self.runner.synchronous),
            "inter_token_ms": {"p50": 1e3 * quantile(gaps, 0.5), "p99": 1e3 * quantile(gaps, 0.99)},
            "first_token_ms": {"p50": 1e3 * quantile(first, 0.5), "p99": 1e3 * quantile(first, 0.99)},
            "floor_s": self.roofline_seconds(trace),
            "trace": trace,
        }

    @contextmanager
    def first_times(self) -> Iterator[dict[str, Any]]:
        """Kernels compiled or loaded, and graphs captured, that the warm-up had missed."""
        found: dict[str, Any] = {"kernels": [], "graphs": 0}
        if self.runner.device.type == "cpu":
            yield found
            return
        from ..kernels.triton_support import compiled_kernels

        graphs = self.runner.graphs
        before = 0 if graphs is None else len(graphs.captured)
        with compiled_kernels() as found["kernels"]:
            yield found
        found["graphs"] = 0 if graphs is None else len(graphs.captured) - before

    def roofline_seconds(self, trace: Trace) -> float:
        """The decoding steps of a trace, each at its roofline."""
        return sum(
            self.roofline.weight_bytes(len(step.chunks)) / self.roofline.bandwidth
            + sum(self.roofline.kv_bytes(1, chunk.start + chunk.count) for chunk in step.chunks)
            / self.roofline.bandwidth
            for step in trace.steps
            if not step.prompt_tokens
        )

    def describe(self) -> dict[str, Any]:
        spec, device = self.engine.spec, self.runner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {
            "device": name,
            "dtype": spec.dtype,
            "kv_dtype": spec.kv_dtype,
            "max_seqs": spec.max_seqs,
            "max_batch_tokens": spec.max_batch_tokens,
            "bandwidth_gbs": self.roofline.bandwidth / 1e9,
            "weights": binary_bytes(self.roofline.weight_bytes(1)),
        }


def fit_to_context(prompt: int, answer: int, context: int) -> tuple[int, int]:
    """(prompt, answer), shrunk in proportion to fit in the context."""
    if prompt + answer <= context:
        return prompt, answer
    shorter = max(1, prompt * context // (prompt + answer))
    return shorter, max(1, context - shorter)


def quantile(values: Sequence[float], part: float) -> float:
    """0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def bench_offline(engine: Engine, workload: Workload, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Every figure of `lmworks bench offline` except start-up time."""
    bench = EngineBench(engine, workload.seed)
    warm_up_s = bench.warm_up()
    times = [bench.step_time(batch) for batch in batches if batch <= engine.spec.max_seqs]
    facts = bench.throughput(workload)
    del facts["trace"]
    return {
        **bench.describe(),
        **facts,
        "warm_up_s": warm_up_s,
        "decode_ms": {str(one.batch): 1e3 * one.seconds for one in times},
        "floor_ms": 1e3 * times[0].roofline,
        "floors_ms": {str(one.batch): 1e3 * one.roofline for one in times},
    }
