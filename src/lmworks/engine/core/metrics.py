"""Engine metrics: counters, gauges and histograms, named as in vLLM."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from ...observability.catalog import BUCKETS, N_BUCKETS, STEP_BUCKETS, TOKEN_BUCKETS
from .request import Request, Sequence
from .scheduler import Scheduler, Step


@dataclass
class Histogram:
    """Values in buckets; the last counts those above all bounds."""

    bounds: ClassVar[tuple[float, ...]] = BUCKETS
    counts: list[int] = field(default_factory=list)
    count: int = 0
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.count += times
        self.total += value * times

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class TokenHistogram(Histogram):
    bounds: ClassVar = TOKEN_BUCKETS


class StepHistogram(Histogram):
    bounds: ClassVar = STEP_BUCKETS


class AnswerHistogram(Histogram):
    bounds: ClassVar = N_BUCKETS


@dataclass
class Metrics:
    """Gauges are of the latest step; the rest has been counted since the start."""

    # gauges
    num_requests_running: int = 0  # counts sequences
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0  # used blocks, 0 to 1
    # counters
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    external_prefix_cache_queries: int = 0  # tokens that the device did not have, looked up in the tiers below it
    external_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    steps: int = 0
    computed_tokens: int = 0  # recomputed ones included
    computed_sequences: int = 0  # rows of all steps: over `steps`, the mean batch
    kv_cache_usage_peak: float = 0.0
    proposed_guesses: int = 0
    accepted_guesses: int = 0
    graph_recaptures: int = 0  # CUDA graphs that a wake-up invalidated: the cache came to another address
    finished: dict[str, int] = field(default_factory=dict)  # answers by reason
    kv_tier_hits: dict[str, int] = field(default_factory=dict)  # blocks by the tier that they came from
    kv_tier_stored: dict[str, int] = field(default_factory=dict)  # blocks by tier
    kv_tier_errors: dict[str, int] = field(default_factory=dict)  # blocks not stored or not used, by why
    kv_tier_bytes: dict[str, int] = field(default_factory=dict)  # now
    adapter_loads: int = 0  # from the store
    warm_adapters: dict[str, int] = field(default_factory=dict)  # names of those that are loaded
    # seconds
    request_queue_time_seconds: Histogram = field(default_factory=Histogram)
    time_to_first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_latency_seconds: Histogram = field(default_factory=Histogram)
    request_time_per_output_token_seconds: Histogram = field(default_factory=Histogram)
    e2e_request_latency_seconds: Histogram = field(default_factory=Histogram)
    request_prefill_time_seconds: Histogram = field(default_factory=Histogram)
    request_decode_time_seconds: Histogram = field(default_factory=Histogram)
    request_inference_time_seconds: Histogram = field(default_factory=Histogram)
    # of a request, and of a step
    request_prompt_tokens: Histogram = field(default_factory=TokenHistogram)
    request_generation_tokens: Histogram = field(default_factory=TokenHistogram)
    request_max_num_generation_tokens: Histogram = field(default_factory=TokenHistogram)
    request_prefill_kv_computed_tokens: Histogram = field(default_factory=TokenHistogram)
    request_params_max_tokens: Histogram = field(default_factory=TokenHistogram)
    request_params_n: Histogram = field(default_factory=AnswerHistogram)
    iteration_tokens_total: Histogram = field(default_factory=StepHistogram)

    @property
    def mean_batch(self) -> float:
        """Sequences in a step."""
        return self.computed_sequences / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Of draft tokens."""
        return self.accepted_guesses / self.proposed_guesses if self.proposed_guesses else 0.0

    def note_start(self, request: Request, now: float) -> None:
        """One of its sequences was admitted."""
        if not request.scheduled_time:
            request.scheduled_time = now
            self.request_queue_time_seconds.add(now - request.arrival_time)

    def note_tokens(self, sequence: Sequence, count: int, now: float) -> None:
        """Tokens of a sequence were read."""
        request = sequence.request
        self.generation_tokens += count
        if not request.first_token_time:
            request.first_token_time = now
            self.time_to_first_token_seconds.add(now - request.arrival_time)
        if sequence.last_token_time:
            self.inter_token_latency_seconds.add((now - sequence.last_token_time) / count, count)
        sequence.last_token_time = now

    def note_inner_tokens(self, previous_times: list[float], now: float) -> None:
        """One token each of sequences whose token before was read at these times."""
        for before, count in Counter(previous_times).items():
            self.generation_tokens += count
            self.inter_token_latency_seconds.add(now - before, count)

    def note_end(self, request: Request) -> None:
        """All its sequences have finished."""
        self.e2e_request_latency_seconds.add(time.monotonic() - request.arrival_time)
        if request.first_token_time:  # or it was cancelled before
            self.note_phases(request)

    def note_phases(self, request: Request) -> None:
        scheduled, first = request.scheduled_time, request.first_token_time
        last = max(sequence.last_token_time for sequence in request.sequences)
        answers = [len(sequence.tokens) - sequence.num_prompt_tokens for sequence in request.sequences]
        prompt = len(request.prompt)
        self.request_prefill_time_seconds.add(first - scheduled)
        self.request_decode_time_seconds.add(last - first)
        self.request_inference_time_seconds.add(last - scheduled)
        if max(answers) > 1:
            self.request_time_per_output_token_seconds.add((last - first) / (max(answers) - 1))
        self.request_prompt_tokens.add(prompt)
        self.request_generation_tokens.add(sum(answers))
        self.request_max_num_generation_tokens.add(max(answers))
        self.request_prefill_kv_computed_tokens.add(prompt - request.cached_tokens)
        self.request_params_max_tokens.add(request.params.max_tokens)
        self.request_params_n.add(request.params.n)

    def note_step(self, step: Step, scheduler: Scheduler) -> None:
        self.num_requests_running = len(scheduler.running)
        self.num_requests_waiting = len(scheduler.waiting)
        self.kv_cache_usage_perc = scheduler.block_manager.num_used_blocks / len(scheduler.block_manager.ref_counts)
        self.kv_cache_usage_peak = max(self.kv_cache_usage_peak, self.kv_cache_usage_perc)
        self.prefix_cache_queries = scheduler.prefix_queries
        self.prefix_cache_hits = scheduler.prefix_hits
        self.external_prefix_cache_queries = scheduler.tier_queries
        self.external_prefix_cache_hits = scheduler.tier_hits
        if scheduler.tiers is not None:
            report = scheduler.tiers.report()
            self.kv_tier_hits, self.kv_tier_stored = report.hits, report.stored
            self.kv_tier_errors, self.kv_tier_bytes = report.errors, report.bytes_used
        self.num_preemptions = scheduler.preemptions
        if step.chunks:
            self.steps += 1
            self.computed_tokens += step.tokens
            self.iteration_tokens_total.add(step.tokens)
            self.computed_sequences += len(step.chunks)
