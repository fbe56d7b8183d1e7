"""Goodput of two servers behind the gateway with prompts that share prefixes: prefix-aware routing against round robin.

    python benchmarks/prefix_routing.py            # llama3-1b (random weights) in two engines on one GPU
    python benchmarks/prefix_routing.py --small    # a tiny model on a CPU

Real `lmworks serve` processes, a real gateway, real sockets (`lmworks fleet up`). The prefixes together are 2.25 times
as long as what one engine's cache holds (`engine.blocks`), so one server cannot keep all of them, and two can keep
nearly all if each has its own. Both policies are names of one model at the same gateway. For each, the caches are
emptied, every prefix is sent twice, and then requests arrive at growing rates, as a Poisson process, until few meet the
SLO. Hit rates are the share of prompt tokens that the servers say were cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: here, and in the servers that are started

from common import write_result
from local_fleet import MODEL, LocalFleet, fleet_up

from lmworks.bench.http_client import Target
from lmworks.bench.serve import LoadGenerator, Measured, Slo
from lmworks.bench.workload import Arrivals, Load, TimedRequest, random_ids

POLICIES = {"round_robin": ["round_robin"], "prefix_cache": ["prefix_cache"]}
FEW = 0.5  # a rate at which fewer meet the SLO is the last
Range = tuple[int, int]


@dataclass(frozen=True)
class Case:
    model: str
    blocks: int  # of 16 tokens: one engine's cache
    prefix: int  # tokens
    prefixes: int
    suffix: Range
    answer: Range
    options: tuple[str, ...]
    slo: Slo
    rates: tuple[float, ...]
    seconds: float  # at each rate

    @property
    def working_set(self) -> float:
        """All prefixes, in caches of one engine."""
        return self.prefix * self.prefixes / (16 * self.blocks)


GPU = Case(
    "llama3-1b", 12_500, 4096, 110, (32, 128), (16, 48),
    ("engine.context=8192", "engine.max_seqs=16", "engine.max_batch_tokens=2048"),
    Slo(ttft=0.3, tpot=0.03), (20.0, 35.0, 50.0, 70.0, 90.0, 110.0), 5.0,
)  # fmt: skip
SMALL = Case(
    "cpu-10m", 100, 160, 22, (4, 12), (2, 6), ("engine.max_seqs=4", "engine.max_batch_tokens=64"),
    Slo(ttft=1.0, tpot=0.3), (1.0, 2.0, 4.0), 6.0,
)  # fmt: skip


def requests(case: Case, model: str, rate: float, seed: int) -> list[TimedRequest]:
    """Prefixes are the same for every seed."""
    prefixes = prefixes_of(case)
    luck = random.Random(seed)
    times = Arrivals(rate=rate).times(int(rate * case.seconds), luck)
    return [request(model, at, luck.choice(prefixes), case, luck) for at in times]


def prefixes_of(case: Case) -> list[list[int]]:
    luck = random.Random(0)
    return [random_ids(case.prefix, luck) for _ in range(case.prefixes)]


def request(model: str, at: float, prefix: list[int], case: Case, luck: random.Random) -> TimedRequest:
    body = {
        "model": model, "prompt": prefix + random_ids(luck.randint(*case.suffix), luck), "temperature": 0,
        "max_tokens": luck.randint(*case.answer), "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return TimedRequest(at, json.dumps(body, separators=(",", ":")).encode(), body["max_tokens"])


def send(fleet: LocalFleet, shots: Sequence[TimedRequest], case: Case, concurrency: int = 0) -> Measured:
    generator = LoadGenerator(Target.of(fleet.gateway), "/v1/completions")
    outcomes = asyncio.run(generator.run(shots, concurrency))
    return Measured(fleet.gateway, "", "completions", Load(), case.slo, tuple(outcomes))


def fill(fleet: LocalFleet, policy: str, case: Case) -> None:
    """Every prefix twice, so that each server may have it under either policy."""
    luck = random.Random(1)
    order = luck.sample(prefixes_of(case) * 2, 2 * case.prefixes)
    shots = [request(policy, 0.0, prefix, case, luck) for prefix in order]
    if errors := send(fleet, shots, case, concurrency=8).to_dict()["errors"]:
        raise SystemExit(f"the servers do not answer: {errors}")


def measure(fleet: LocalFleet, policy: str, case: Case) -> list[dict[str, Any]]:
    fleet.forget_prefixes()
    fill(fleet, policy, case)
    rows = []
    for number, rate in enumerate(case.rates):
        found = send(fleet, requests(case, policy, rate, 100 + number), case).to_dict()
        rows.append(
            {
                "rate": rate,
                "goodput_per_s": found["goodput"]["requests_per_s"],
                "within_slo": found["goodput"]["share"],
                "hit_rate": found["cached_tokens"] / max(1, found["input_tokens"]),
                **{name: found[name] for name in ("requests", "ttft_s", "request_itl_s", "rejected", "errors")},
            }
        )
        show(policy, rows[-1])
        if rows[-1]["within_slo"] < FEW:
            break
    return rows


def show(policy: str, row: dict[str, Any]) -> None:
    first, gap = row["ttft_s"], row["request_itl_s"]
    print(
        f"{policy:<12} {row['rate']:6.1f}/s: goodput {row['goodput_per_s']:6.2f}/s ({row['within_slo']:.0%}), "
        f"hits {row['hit_rate']:.1%}, TTFT p50 {1e3 * first['p50']:.0f} ms, p99 {1e3 * first['p99']:.0f} ms, "
        f"TPOT p50 {1e3 * gap['p50']:.1f} ms {row['errors'] or ''}{row['rejected'] or ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU; nothing is saved")
    small = parser.parse_args().small
    case = SMALL if small else GPU
    models = [{"name": name, "serves": MODEL, "policy": policy} for name, policy in POLICIES.items()]
    found: dict[str, Any] = {"case": asdict(case), "working_set": case.working_set, "policies": {}}
    print(f"{case.prefixes} prefixes of {case.prefix} tokens: {case.working_set:.2f} times one engine's cache")
    with fleet_up(case.model, 2, [*case.options, f"engine.blocks={case.blocks}"], {"models": models}) as fleet:
        for policy in POLICIES:
            found["policies"][policy] = measure(fleet, policy, case)
            if not small:
                write_result("prefix_routing", found)
    best = {policy: max(row["goodput_per_s"] for row in rows) for policy, rows in found["policies"].items()}
    found["best_goodput_per_s"], found["ratio"] = best, best["prefix_cache"] / best["round_robin"]
    print(f"best goodput {best}: {found['ratio']:.2f} times")
    if not small:
        print(write_result("prefix_routing", found))


if __name__ == "__main__":
    main()
