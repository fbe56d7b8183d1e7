"""Data-parallel training against one rank: the same batches, every gradient and weight put together and compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmworks.kernels.training.cross_entropy import IGNORE
from lmworks.model import GPT
from lmworks.model.gpt import initial_weight
from lmworks.parallel.data_parallel import DataParallel, Shard
from lmworks.parallel.mesh import Mesh
from lmworks.spec import Grid, RunSpec

ACCUMULATION, STEPS = 3, 2  # a strategy learns what to send, and when, in the first step
# Rows that no number of ranks divides (61, 50), and a weight with fewer rows than there are ranks (q_norm: 2).
DENSE = {"vocab": 61, "hidden": 32, "layers": 2, "heads": 16, "kv_heads": 8, "ffn": 50, "context": 16, "qk_norm": True}
SPARSE = {**DENSE, "experts": 4, "top_k": 2, "expert_ffn": 6, "shared_experts": 1}
Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


def make_spec(parallel: dict[str, Any], model: dict[str, Any] = DENSE, **sections: Any) -> RunSpec:
    data = {"seq": 16, "micro_batch": 2}
    table = {"model": {"preset": "tiny", **model}, "data": data, "parallel": {"bucket_mb": 0.01, **parallel}}
    return RunSpec.from_dict({**table, **sections})


def batches_of(rank: int, step: int) -> list[Batch]:
    """Micro-batches in which unequal numbers of targets count."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for index in range(ACCUMULATION):
        tokens = torch.randint(0, 61, (2, 17), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, : 3 * index + rank] = IGNORE
        found.append((tokens[:, :-1], targets))
    return found


def counted(world: int, step: int) -> int:
    return sum(int((targets != IGNORE).sum()) for rank in range(world) for _, targets in batches_of(rank, step))


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)  # of the global batch, by step
    gradients: list[Weights] = field(default_factory=list)  # whole, by step
    weights: Weights = field(default_factory=dict)  # after the last step
    early: list[str] = field(default_factory=list)  # reductions before the last micro-batch of each step
    late: list[str] = field(default_factory=list)  # reductions from then on


def start(spec: RunSpec, name: str, shape: torch.Size, ep: int, experts: set[str]) -> Tensor:
    """An initial weight; experts differ from one expert-parallel rank to the next."""
    weight = initial_weight(spec.model, 0, name, shape)
    return weight * (1 + ep) if name in experts else weight


def autocast(spec: RunSpec) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=spec.precision.dtype == "bf16")


def one_rank(spec: RunSpec, optimizer: Callable[..., Any], experts: set[str], grid: Grid) -> list[Trace]:
    """What every rank's batches give in one process: a model for each expert-parallel place, alike but for experts."""
    models = [GPT(spec.model) for _ in range(grid.ep)]
    with torch.no_grad():
        for ep, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.copy_(start(spec, name, parameter.shape, ep, experts))
    optimizers = [optimizer(list(model.parameters())) for model in models]
    traces = [Trace() for _ in models]
    for step in range(STEPS):
        tokens, total = counted(grid.world, step), 0.0
        for rank in range(grid.world):
            for inputs, targets in batches_of(rank, step):
                with autocast(spec):
                    model = models[grid.coordinates(rank)["ep"]]
                    _, loss = model(inputs, targets, reduction="sum", keep_logits=False)
                (loss / tokens).backward()
                total += loss.item() / tokens
        share_dense(models, experts)
        for model, trace, optim in zip(models, traces, optimizers, strict=True):
            trace.losses.append(total)
            trace.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optim.step()
            optim.zero_grad()
    for model, trace in zip(models, traces, strict=True):
        trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return traces


def share_dense(models: list[GPT], experts: set[str]) -> None:
    """Sum what the models have in common."""
    for name, _ in models[0].named_parameters():
        if name not in experts:
            total = sum(model.get_parameter(name).grad for model in models)
            for model in models:
                model.get_parameter(name).grad = total.clone()


class Collectives(TorchDispatchMode):
    """Names of the collectives that are started, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))

    def reductions(self) -> list[str]:
        found = [name for name in self.names if "reduce" in name]
        self.names.clear()
        return found


def on_many(
    strategy: DataParallel, spec: RunSpec, optimizer: Callable[..., Any], mesh: Mesh, contexts: bool = True
) -> Trace:
    """The same steps under a strategy; `contexts` False: as a pipeline drives it, without `micro_batch`."""
    trace = Trace()
    rank = dist.get_rank()
    optim = optimizer([shard.leaf for shard in strategy.shards()])
    for step in range(STEPS):
        tokens, total = counted(dist.get_world_size(), step), torch.zeros(())
        with Collectives() as collectives:
            for index, (inputs, targets) in enumerate(batches_of(rank, step)):
                last = index == ACCUMULATION - 1
                if last:
                    trace.early += collectives.reductions()
                with strategy.micro_batch(last) if contexts else nullcontext():
                    with autocast(spec):
                        _, loss = strategy(inputs, targets, reduction="sum", keep_logits=False)
                    (loss * strategy.loss_factor / tokens).backward()
                total += loss.detach() / tokens
            strategy.finish()
            trace.late += collectives.reductions()
        dist.all_reduce(total)
        trace.losses.append(total.item())
        trace.gradients.append(whole(strategy.shards(), mesh, lambda leaf: leaf.grad))
        optim.step()
        strategy.after_step()
        strategy.zero_grad()
        with torch.no_grad(), autocast(spec):  # an evaluation must leave nothing behind
            strategy(inputs, targets, reduction="sum", keep_logits=False)
    trace.weights = whole(strategy.shards(), mesh, Tensor.detach)
    return trace


def whole(shards: list[Shard], mesh: Mesh, read: Callable[[Tensor], Tensor | None]) -> Weights:
    """What is read from the leaves, put together from the ranks that share them; none of it counts as zeros."""
    found = {}
    for rows in dict.fromkeys(shard.rows for shard in shards):
        some = [shard for shard in shards if shard.rows == rows]
        mine = [torch.zeros_like(s.leaf) if (part := read(s.leaf)) is None else part.clone() for s in some]
        parts = [mine]
        if rows is not None:
            group = mesh.group("shard" if rows == "flat" else rows)
            parts = [[] for _ in range(group.size())]
            dist.all_gather_object(parts, mine, group=group)
        for shard, *pieces in zip(some, *parts, strict=True):
            found[shard.name] = torch.cat(pieces).view(shard.shape) if rows is not None else pieces[0]
    return {shard.name: found[shard.name] for shard in shards}


def worst(one: Weights, other: Weights) -> tuple[float, str]:
    """The largest relative difference ‖a − b‖ / ‖a‖, and whose it is."""
    assert one.keys() == other.keys()
    return max((((one[n] - other[n]).norm() / one[n].norm().clamp(min=1e-30)).item(), n) for n in one)


def compare(one: Trace, many: Trace) -> dict[str, tuple[float, str]]:
    loss = max(abs(a - b) / abs(a) for a, b in zip(one.losses, many.losses, strict=True))
    gradients = [worst(a, b) for a, b in zip(one.gradients, many.gradients, strict=True)]
    joined = [{"all": torch.cat([g.flatten() for g in trace.gradients[0].values()])} for trace in (one, many)]
    return {
        "loss": (loss, ""),
        "gradient": worst(*joined),  # of the first step, as one long vector
        "gradients": max(gradients),  # of every step, the worst weight's
        "weights": worst(one.weights, many.weights),
    }


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.1),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=1e-3, fused=True),
}
REFERENCES: dict[str, list[Trace]] = {}  # what one rank gives, computed once in a process
Build = Callable[[RunSpec, Mesh, set[str]], DataParallel]


@dataclass
class Outcome:
    differences: dict[str, tuple[float, str]]
    trace: Trace  # without its tensors


def with_rules(specs: dict[str, RunSpec], without_adamw: tuple[str, ...] = ()) -> dict[str, RunSpec]:
    """Cases "name / sgd" and "name / adamw" (but for those whose name has one of `without_adamw` in it)."""
    adamw = {name: spec for name, spec in specs.items() if not any(word in name for word in without_adamw)}
    return {f"{n} / sgd": s for n, s in specs.items()} | {f"{n} / adamw": s for n, s in adamw.items()}


def compare_cases(rank: int, cases: dict[str, RunSpec], build: Build, contexts: bool = True) -> dict[str, Outcome]:
    """How far this rank is from one rank, by case."""
    found = {}
    for name, spec in cases.items():
        rule = name.split(" / ")[1]
        mesh = mesh_of(Grid.of(spec.parallel))
        names = [n for n, _ in GPT(spec.model).named_parameters()]
        experts = {n for n in names if n.endswith(("mlp.gate", "mlp.up", "mlp.down"))} if mesh.grid.ep > 1 else set()
        key = f"{spec.model} {spec.precision.dtype} {rule} {mesh.grid.ep}"
        if key not in REFERENCES:  # one rank computes it, the others only wait
            traces = [one_rank(spec, OPTIMIZERS[rule], experts, mesh.grid) if rank == 0 else None]
            dist.broadcast_object_list(traces)
            REFERENCES[key] = traces[0]
        many = on_many(build(spec, mesh, experts), spec, OPTIMIZERS[rule], mesh, contexts)
        differences = compare(REFERENCES[key][mesh.rank("ep")], many)
        found[name] = Outcome(differences, replace(many, gradients=[], weights={}))
    return found


@cache
def mesh_of(grid: Grid) -> Mesh:
    """Making its groups takes longer than a case does."""
    return Mesh(grid, "cpu")


def check(differences: dict[str, tuple[float, str]], **looser: float) -> None:
    limits = {"loss": 1e-6, "gradient": 1e-5, "gradients": 1e-5, "weights": 1e-5, **looser}
    for what, (difference, name) in differences.items():
        assert difference <= limits[what], f"{what} of {name} differ by {difference:.1e}"
