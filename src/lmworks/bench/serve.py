"""Latency, throughput and SLO attainment of a server under load: `lmworks bench serve`.

Latency counts from the scheduled time of a request, so delays of any kind, of this client too, are included: a server
that stalls cannot hide the requests that should have been sent meanwhile (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..record.formatting import duration
from ..report.plots import has_matplotlib, save
from ..spec import LMWorksError, SpecError
from ..spec.serving import parse_slo
from .http_client import Reply, Target, first_model, post
from .workload import Endpoint, Load, TimedRequest

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REJECTED = (429, 503)  # the server is full: a rejection, not an error
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
START_DELAY_S = 0.05  # before the first request, so that it is not late


@dataclass(frozen=True)
class Slo:
    """Limits of every request in seconds. `tpot`: the mean time between the tokens of one request."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ttft=0.5,tpot=0.05,e2e=10; any may be left out."""
        return cls(**parse_slo(text))

    def met(self, one: Outcome) -> bool:
        limits = ((self.ttft, one.ttft), (self.tpot, one.tpot), (self.e2e, one.e2e))
        return one.kind == "completed" and all(limit is None or value <= limit for limit, value in limits)

    @property
    def limits(self) -> dict[str, float]:
        kept = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return kept | ({"itl": self.tpot} if self.tpot is not None else {})  # the key of older results


@dataclass(frozen=True)
class Outcome:
    """The result of one request."""

    scheduled: float  # seconds from the start
    late: float  # delay of sending, caused by this client
    ended: float  # seconds from the start
    times: tuple[float, ...]  # of events with tokens, seconds from the start
    status: int
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    tokens: int

    @classmethod
    def of(cls, reply: Reply, scheduled: float, sent: float, start: float) -> Outcome:
        usage = reply.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            scheduled=scheduled - start,
            late=sent - scheduled,
            ended=reply.ended - start,
            times=tuple(at - start for at in reply.times),
            status=reply.status,
            error=reply.error,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            tokens=usage.get("completion_tokens") or len(reply.times),  # events, if the server does not count tokens
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kind(self) -> str:
        if self.error is None:
            return "completed"
        return "rejected" if self.status in REJECTED else "error"

    @property
    def ttft(self) -> float:
        return (self.times[0] if self.times else self.ended) - self.scheduled

    @property
    def e2e(self) -> float:
        return self.ended - self.scheduled

    @property
    def inter_token_latencies(self) -> list[float]:
        """Between events; an event may have several tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and self.times else 0.0


@dataclass(frozen=True)
class Measured:
    """All outcomes of one run, in scheduled order."""

    url: str
    model: str
    endpoint: Endpoint
    load: Load
    slo: Slo
    outcomes: tuple[Outcome, ...]

    def with_kind(self, kind: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.kind == kind]

    @cached_property
    def within_slo(self) -> list[Outcome]:
        return [one for one in self.outcomes if self.slo.met(one)]

    @property
    def seconds(self) -> float:
        """From the first scheduled time to the last end."""
        return max(one.ended for one in self.outcomes) - min(one.scheduled for one in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        done, rejected = self.with_kind("completed"), self.with_kind("rejected")
        seconds = self.seconds
        tokens = sum(one.tokens for one in done)
        return {
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "arrivals": self.load.arrivals.text,
            "seconds": seconds,
            "requests": len(self.outcomes),
            "completed": len(done),
            "rejected": dict(sorted(Counter(str(one.status) for one in rejected).items())),
            "errors": dict(Counter(str(one.error) for one in self.with_kind("error")).most_common()),
            "input_tokens": sum(one.prompt_tokens for one in done),
            "cached_tokens": sum(one.cached_tokens for one in done),
            "output_tokens": tokens,
            "requests_per_s": len(done) / seconds,
            "output_tokens_per_s": tokens / seconds,
            "goodput": {
                "slo": self.slo.limits,
                "requests": len(self.within_slo),
                "requests_per_s": len(self.within_slo) / seconds,
                "share": len(self.within_slo) / len(self.outcomes),
            },
            "ttft_s": summary([one.ttft for one in done]),
            "itl_s": summary([gap for one in done for gap in one.inter_token_latencies]),
            "request_itl_s": summary([one.tpot for one in done if one.tokens > 1]),
            "e2e_s": summary([one.e2e for one in done]),
            "rejected_s": summary([one.e2e for one in rejected]),
            "late_s": summary([one.late for one in self.outcomes]),
        }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None for no values."""
    if not values:
        return None
    marks = np.percentile(values, list(QUANTILES.values()))
    shown = {name: float(mark) for name, mark in zip(QUANTILES, marks, strict=True)}
    return {"mean": float(np.mean(values)), **shown, "max": float(max(values))}


# --- running ----------------------------------------------------------------------------------------------

OnOutcome = Callable[[Outcome], None]


def bench_serve(
    url: str,
    load: Load,
    slo: Slo,
    *,
    model: str | None = None,
    endpoint: Endpoint = "completions",
    key: str | None = None,
    timeout: float = 600.0,
    on_outcome: OnOutcome | None = None,
) -> Measured:
    """Sends the load to any OpenAI-compatible server. `on_outcome` is called with each outcome."""
    target = Target.of(url, key)
    raise_open_file_limit()

    async def whole() -> Measured:
        named = model or await first_model(target)
        requests = load.draw(endpoint, named)
        outcomes = await LoadGenerator(target, PATHS[endpoint], timeout, on_outcome).run(
            requests, load.arrivals.concurrency
        )
        return Measured(url, named, endpoint, load, slo, tuple(outcomes))

    return asyncio.run(whole())


@dataclass(frozen=True)
class LoadGenerator:
    target: Target
    path: str
    timeout: float = 600.0
    on_outcome: OnOutcome | None = None

    async def run(self, requests: Sequence[TimedRequest], concurrency: int = 0) -> list[Outcome]:
        if not requests:
            raise LMWorksError("there are no requests to send")
        if concurrency:
            return await self.closed_loop(requests, concurrency)
        return await self.open_loop(requests)

    async def open_loop(self, requests: Sequence[TimedRequest]) -> list[Outcome]:
        """Each request is sent at its scheduled time, independent of the others."""
        start = time.perf_counter() + START_DELAY_S
        tasks = []
        for request in requests:
            if (wait := start + request.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self.send(request, start + request.at, start)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(self, requests: Sequence[TimedRequest], concurrency: int) -> list[Outcome]:
        """Each request is sent when a previous one has ended."""
        start = time.perf_counter()
        waiting = iter(requests)

        async def one_after_another(left: Iterable[TimedRequest]) -> list[Outcome]:
            return [await self.send(request, time.perf_counter(), start) for request in left]

        done = await asyncio.gather(*(one_after_another(waiting) for _ in range(concurrency)))
        return sorted(itertools.chain(*done), key=lambda one: one.scheduled)

    async def send(self, request: TimedRequest, scheduled: float, start: float) -> Outcome:
        sent = time.perf_counter()
        outcome = Outcome.of(await post(self.target, self.path, request.body, self.timeout), scheduled, sent, start)
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        return outcome


def raise_open_file_limit() -> None:
    """A thousand streams are a thousand open files, and the default soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


def write_outcomes(outcomes: Iterable[Outcome], path: Path) -> None:
    """A line of JSON for each request, with the time of each of its tokens."""
    lines = [json.dumps(one.to_dict()) + "\n" for one in outcomes]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise LMWorksError(f"--save {path}: {error.strerror}") from None


# --- serve plot ------------------------------------------------------------------------------------------


BLUE, ORANGE, RED, INK = "#2a6fd6", "#d9622b", "#b93a32", "#5d6066"


def draw_bench(measured: Measured, path: Path) -> Path:
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.subplots(2, 2)
    done, slo = measured.with_kind("completed"), measured.slo
    plot_cdf(grid[0][0], "time to first token", [one.ttft for one in done], slo.ttft)
    plot_cdf(grid[0][1], "time between tokens, mean of a request", [one.tpot for one in done], slo.tpot)
    plot_cdf(grid[1][0], "whole request", [one.e2e for one in done], slo.e2e)
    over_time(grid[1][1], measured)
    count = f"{len(done)} of {len(measured.outcomes)} requests completed"
    figure.suptitle(f"{measured.model}: {measured.load.arrivals.text}, {count}", fontsize=11)
    return save(figure, path)


def plot_cdf(axes: Any, title: str, values: Sequence[float], limit: float | None) -> None:
    """Cumulative distribution over requests."""
    frame(axes, title)
    axes.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1.02))
    if not values:
        return
    ordered = np.sort(values)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=BLUE, drawstyle="steps-post")
    for name, mark in zip(QUANTILES, np.percentile(values, list(QUANTILES.values())), strict=True):
        axes.plot([mark], [QUANTILES[name] / 100], "o", color=BLUE, markersize=4)
        axes.annotate(f"{name} {duration(float(mark))}", (mark, QUANTILES[name] / 100), xytext=(6, -10),
                      textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
    if limit is not None:
        axes.axvline(limit, color=ORANGE, linestyle="--", linewidth=1, label="SLO")
        axes.legend(frameon=False, loc="lower right")
    axes.set_xlim(left=0)


def over_time(axes: Any, measured: Measured) -> None:
    """Time to first token of every request at its scheduled time; rejections and errors as crosses."""
    frame(axes, "first token, over time")
    axes.set(xlabel="seconds since the start", ylabel="seconds to the first token")
    for kind, colour, label in (("completed", BLUE, ""), ("rejected", ORANGE, "rejected"), ("error", RED, "failed")):
        with_kind = measured.with_kind(kind)
        if with_kind:
            heights = [one.ttft if kind == "completed" else 0.0 for one in with_kind]
            how = {"marker": "o", "s": 12} if kind == "completed" else {"marker": "x", "s": 18}
            axes.scatter([one.scheduled for one in with_kind], heights, color=colour, alpha=0.7, linewidths=1,
                         label=f"{label or 'answered'} ({len(with_kind)})", **how)  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)


def frame(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
