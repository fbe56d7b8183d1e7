"""Coordinate check (Tensor Programs V, appendix D.1): does the size of activations depend on width, or on depth?

A model is built in several widths (depths) under each parametrization and takes a few steps of its optimizer on one
batch. Of the activations of each role the mean |x| is recorded before every step, and the mean |x − x₀|, how far they
have moved. Under μP both level off with width: the slope of log |x| against log width is about 0. Under the standard
parametrization some grow, and a learning rate that suits one width is too high for the next.

Two things shrink with width by design, and only at the start: logits of initial weights, as 1/√width, until what is
learned outweighs them; and, with depth, what one residual branch adds, as 1/layers, which is why branches are not among
the roles of a check in depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..data import Batch, open_batches
from ..data.pipeline import check_vocabulary
from ..model import GPT
from ..parallel.single_rank import SingleRank
from ..spec import ModelSpec, RunSpec, SpecError
from ..spec.parametrization import resized
from ..train.device import pick_device
from ..train.optim import make_optimizer, set_learning_rate

PARAMETRIZATIONS = ("standard", "mup")
STANDARD: dict[str, Any] = {
    "parametrization": "standard",
    "mup_base_hidden": 0,
    "mup_base_layers": 0,
    "mup_base_head_dim": 0,
}
# Modules of a block, and what they give.
ROLES = {
    "attention.q": "query",
    "attention.q_b": "query",
    "attention.k": "key",
    "attention.v": "value",
    "attention.kv_b": "key, value",
    "attention": "attention out",
    "mlp.router": "router",
    "mlp.up": "mlp up",
    "mlp": "mlp out",
}
BRANCHES = ("attention out", "mlp out")


@dataclass(frozen=True)
class RoleCurve:
    """Of one role: by size, then by step."""

    size: list[list[float]]  # mean |x|
    change: list[list[float]]  # mean |x − x₀|
    slopes: list[float]  # of log |x| against log width, at each step
    change_slopes: list[float]  # of the change; the first, before any step, is 0


@dataclass(frozen=True)
class Check:
    """One axis: the same model in several widths, or depths."""

    axis: str  # "width" or "depth"
    sizes: list[int]
    roles: dict[str, dict[str, RoleCurve]]  # parametrization → role → curve

    def steepest(self, parametrization: str) -> tuple[str, float]:
        """The role whose activations depend on the size most after the last step, and its slope."""
        slopes = {role: curve.slopes[-1] for role, curve in self.roles[parametrization].items()}
        role = max(slopes, key=lambda role: abs(slopes[role]))
        return role, slopes[role]

    def to_dict(self) -> dict[str, Any]:
        steepest = {name: dict(zip(("role", "slope"), self.steepest(name), strict=True)) for name in self.roles}
        roles = {name: {role: vars(curve) for role, curve in found.items()} for name, found in self.roles.items()}
        return {"axis": self.axis, "sizes": self.sizes, "steepest": steepest, "roles": roles}


def coordinate_check(
    spec: RunSpec,
    widths: Sequence[int],
    depths: Sequence[int],
    steps: int,
    seeds: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Check]:
    """Under both parametrizations; the base of μP is the spec's, or else the smallest width and depth."""
    axes = {axis: list(sizes) for axis, sizes in (("width", widths), ("depth", depths)) if sizes}
    models = {}
    for axis, sizes in axes.items():
        check_sizes(sizes, f"--{axis}s")
        shapes = [(size, spec.model.layers) if axis == "width" else (spec.model.hidden, size) for size in sizes]
        models[axis] = {name: variants(spec.model, name, shapes) for name in PARAMETRIZATIONS}
    device = pick_device(spec.cluster)
    batches = open_batches(spec.data, spec.checkpoint.init, seed=spec.seed, rank=0, world=1)
    check_vocabulary(spec, batches.vocab_size)
    batch = batches.at(0)[0].to(device)
    found = []
    for axis, by_name in models.items():
        roles = {}
        for name, built in by_name.items():
            measured = []
            for model in built:
                progress(f"{name}: {model.layers} layers of width {model.hidden}")
                measured.append(mean_of_seeds([train(spec, model, batch, steps, seed) for seed in range(seeds)]))
            roles[name] = {
                role: curve(axes[axis], [one[role] for one in measured])
                for role in measured[0]
                if axis == "width" or role not in BRANCHES
            }
        found.append(Check(axis, axes[axis], roles))
    return found


def check_sizes(sizes: Sequence[int], option: str) -> None:
    if len(sizes) == 1 or any(one >= other for one, other in itertools.pairwise(sizes)):
        shown = ",".join(map(str, sizes))
        raise SpecError(f"{option} {shown}: name at least two sizes, the smallest first, e.g. 64,128,256")


def variants(model: ModelSpec, parametrization: str, shapes: Sequence[tuple[int, int]]) -> list[ModelSpec]:
    standard = model.replace(**STANDARD)
    sizes = [resized(standard, hidden, layers) for hidden, layers in shapes]
    if parametrization == "standard":
        return sizes
    base_hidden = model.mup_base_hidden or shapes[0][0]
    base_layers = model.given["mup_base_layers"] or shapes[0][1]
    keys = {"parametrization": "mup", "mup_base_hidden": base_hidden, "mup_base_layers": base_layers}
    return [size.replace(**keys, mup_base_head_dim=model.mup_base_head_dim) for size in sizes]


Measured = dict[str, list[tuple[float, float]]]  # role → mean |x| and mean |x − x₀| before each step


def train(spec: RunSpec, model: ModelSpec, batch: Batch, steps: int, seed: int) -> Measured:
    """Steps of the spec's optimizer at its peak learning rate, in fp32, all on one batch."""
    network = GPT(model, seed=seed).to(batch.tokens.device)
    optimizer = make_optimizer(SingleRank(network).shards(), model, spec.optim)
    found: Measured = {}
    first: dict[str, list[Tensor]] = {}
    for _ in range(steps + 1):
        with recorded(network) as activations:
            logits, loss = network(batch.tokens, batch.targets, documents=batch.documents)
        activations["logits"] = [logits.detach()]
        first = first or activations
        for role, tensors in activations.items():
            size = sum(float(x.abs().mean()) for x in tensors) / len(tensors)
            pairs = zip(tensors, first[role], strict=True)
            change = sum(float((x - x0).abs().mean()) for x, x0 in pairs) / len(tensors)
            found.setdefault(role, []).append((size, change))
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, spec.optim.lr)
        optimizer.step()
    return found


@contextmanager
def recorded(network: GPT) -> Iterator[dict[str, list[Tensor]]]:
    """Activations by role of the passes within: a tensor a layer; of the residual stream, where it ends."""
    found: dict[str, list[Tensor]] = {}

    def record(role: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: found.setdefault(role, []).append(output.detach())

    assert network.embed is not None
    hooks = [network.embed.register_forward_hook(record("embedding"))]
    for block in network.layers():
        modules = dict(block.named_modules())
        hooks += [modules[name].register_forward_hook(record(role)) for name, role in ROLES.items() if name in modules]
    hooks.append(network.layers()[-1].register_forward_hook(record("residual stream")))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def mean_of_seeds(runs: Sequence[Measured]) -> Measured:
    def mean(role: str, step: int) -> tuple[float, float]:
        pairs = [run[role][step] for run in runs]
        return sum(size for size, _ in pairs) / len(runs), sum(change for _, change in pairs) / len(runs)

    return {role: [mean(role, step) for step in range(len(points))] for role, points in runs[0].items()}


def curve(sizes: Sequence[int], measured: Sequence[Sequence[tuple[float, float]]]) -> RoleCurve:
    size = [[one for one, _ in points] for points in measured]
    change = [[one for _, one in points] for points in measured]
    steps = range(len(size[0]))
    slopes = [slope(sizes, [points[step] for points in size]) for step in steps]
    return RoleCurve(size, change, slopes, [slope(sizes, [points[step] for points in change]) for step in steps])


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of the least-squares line through log value against log size; 0 where a value is 0: nothing has moved."""
    if min(values) <= 0:
        return 0.0
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    x0, y0 = sum(x) / len(x), sum(y) / len(y)
    return sum((a - x0) * (b - y0) for a, b in zip(x, y, strict=True)) / sum((a - x0) ** 2 for a in x)
