"""What a search is asked: a run without its layout, and the parts of a layout that are given.

The layout in a spec file is what a search replaces. A part of a layout that is typed as an override is kept, as with
`--fix`, or refused by name. Everything else of the spec holds for all layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...spec import Cluster, DataSpec, RunSpec, SpecError
from ...spec.load import apply_overrides, read_source
from ...spec.precision import FP8_ALIGNED
from ...spec.presets import PRESETS
from ...spec.schema import merge
from ..cluster_request import ClusterRequest, given_keys, with_default_seq
from .candidates import OFFLOAD_GIB, SearchProblem
from .explain import Layout, refuse_nonsense
from .search import Found

TOKENS = 1e12  # to train on, where nobody says
WARM_UP = 2000  # steps at most, as Llama 2 and 3 had
MACHINES = ("gpu", "nodes", "gpus_per_node")
PINS = {"data.micro_batch": "micro_batch", "parallel.virtual_stages": "virtual"}
PINS |= {
    f"parallel.{name}": name
    for name in ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard", "schedule", "recompute", "offload", OFFLOAD_GIB)
}
ZERO = "use --fix zero=0 (ddp), 1, 2 or 3 (fsdp2)"
DECIDED = {  # by the search; with what can be given instead
    "parallel.dp": "data parallelism takes the GPUs that tp, cp and pp leave; leave it out",
    "parallel.strategy": ZERO,
    "parallel.zero": ZERO,
    "parallel.sp": "it goes with tensor parallelism; leave it out",
    "parallel.recompute_every": "recompute is of every block; leave it out",
    "parallel.recompute_budget": "use parallel.recompute=none, selective, mlp or full",
}


@dataclass(frozen=True)
class Request:
    base: RunSpec  # on one rank
    cluster: Cluster  # the spec's own
    pinned: Layout
    tokens: float | None  # to train on, as typed
    said: frozenset[str]  # dotted keys that the spec, an option or an override gives

    def tokens_on(self, problem: SearchProblem) -> float:
        """What days and dollars are for, and what the written spec trains on."""
        if self.tokens is not None:
            return self.tokens
        return self.base.optim.steps * problem.global_batch * problem.seq if "optim.steps" in self.said else TOKENS


def read_request(
    source: str,
    overrides: Sequence[str],
    request: ClusterRequest,
    fixed: Layout,
    *,
    clusters: Sequence[str] = (),
    compile: bool | None = None,
    tokens: float | None = None,
    data: str | None = None,
) -> Request:
    """`clusters`, `compile`, `tokens` and `data` as they are typed; None: not said. Overrides hold over all of them."""
    typed = apply_overrides({}, overrides)
    pinned = pins(typed, fixed)
    if clusters and (both := [key for key in MACHINES if key in typed.get("cluster", {})]):
        raise SpecError(f"--cluster and cluster.{both[0]} both say what it runs on; give one of them")
    if tokens is not None and "steps" in typed.get("optim", {}):
        raise SpecError("--tokens and optim.steps both say how long it trains; give one of them")
    said = merge(read_source(source), given_keys(request))
    if compile is not None:
        said = merge(said, {"parallel": {"compile": compile}})
    if data is not None:
        said = merge(without(said, "data.mix"), {"data": {"path": data}})
    said = with_default_seq(apply_overrides(said, overrides))
    given = frozenset(key for key, _ in dotted(said))
    refuse_engine(said)
    said = merge(usual(given, source), said)
    own = Cluster.from_dict(said.get("cluster", {}))
    said = without(said, *PINS, *DECIDED, "cluster.nodes", "cluster.gpus_per_node")
    base = RunSpec.from_dict(merge(said, {"data": {"micro_batch": least_micro_batch(said)}}))
    return Request(base, own, pinned, tokens, given)


def pins(typed: Mapping[str, Any], fixed: Layout) -> Layout:
    """Of `--fix` and of overrides."""
    keys = dict(dotted(typed))
    for key in keys.keys() & DECIDED.keys():
        raise SpecError(f"{key} is what the search decides: {DECIDED[key]}")
    own = {PINS[key]: value for key, value in keys.items() if key in PINS}
    refuse_nonsense(own)
    for name in own.keys() & fixed.keys():
        if own[name] != fixed[name]:
            raise SpecError(f"--fix {name}={fixed[name]} contradicts the override {name}={own[name]}; give one of them")
    return {**fixed, **own}


def usual(given: Iterable[str], source: str) -> dict[str, Any]:
    """What is taken where nothing is said. A corpus that nobody named is not what such a run trains on."""
    tables: dict[str, Any] = {"name": source if source in PRESETS else Path(source).stem}
    tables |= {"precision": {"dtype": "bf16"}, "parallel": {"compile": True}}
    mixed = any(key.startswith("data.mix.") for key in given)
    return tables if mixed else tables | {"data": {"path": ""}}


def least_micro_batch(said: Mapping[str, Any]) -> int:
    """Sequences that every number format takes on one rank."""
    seq = DataSpec.from_dict(said.get("data", {})).seq
    return FP8_ALIGNED // math.gcd(seq, FP8_ALIGNED) if said["precision"]["dtype"] == "fp8" else 1


def refuse_engine(said: Mapping[str, Any]) -> None:
    engine = said.get("parallel", {}).get("engine", "native")
    if engine != "native":
        raise SpecError(f"parallel.engine = {engine!r} is not searched: layouts are those of engine = 'native'")


def dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without(tables: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Dotted keys of a table, left out."""
    left = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    for key in keys:
        table, _, name = key.partition(".")
        if isinstance(left.get(table), dict):
            left[table].pop(name, None)
    return left


def run_of_layout(found: Found, request: Request) -> RunSpec:
    """What the spec says itself holds. Else: as many steps as the tokens take, a warm-up of a tenth of them or 2,000,
    and a checkpoint as often as the bill assumes.
    """
    spec, tokens = found.spec(request.base), request.tokens_on(found.problem)
    steps = math.ceil(tokens / spec.tokens_per_step)
    optim = {"steps": steps}
    if "optim.warmup" not in request.said:
        optim["warmup"] = min(WARM_UP, steps // 10)
    checkpoint = spec.checkpoint
    if "checkpoint.every" not in request.said:
        every = float(found.bill(tokens).save_every_s) / found.step_s
        checkpoint = checkpoint.replace(every=min(max(1, round(every)), steps))
    return spec.replace(optim=spec.optim.replace(**optim), checkpoint=checkpoint)
