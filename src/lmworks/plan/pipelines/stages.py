"""How a network is cut into pipeline stages: runs of layers, so that the slowest stage is as fast as it can be.

A pipeline moves at the pace of its slowest stage, so the split minimises the largest cost. The embedding is a look-up
and costs next to nothing; the head multiplies every token with vocab × hidden weights, often as much as several
layers, and the last stage gets fewer of them. Costs are forward FLOPs a token; the backward pass is twice of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from ...spec import ModelSpec, RunSpec, SpecError, components
from ..flops import block_flops_per_token, head_flops_per_token
from .schedule import Action, Span, actions, durations, simulate, stage_times, stages_of


@dataclass(frozen=True)
class Stage:
    index: int
    layers: range
    first: bool  # it holds the embedding
    last: bool  # it holds the final norm and the head

    def params(self, model: ModelSpec) -> int:
        """Weights of this part; a tied embedding is held, and counted, on both ends."""
        count = sum(weight.size for layer in self.layers for weight in components.block_weights(model.at(layer)))
        if self.first:
            count += model.embedding_params
        if self.last:
            count += model.norm_params
            tied = self.first and model.tie_embeddings
            count += 0 if tied else model.head_outputs * model.hidden
        return count

    def cost(self, model: ModelSpec, seq: int) -> float:
        """Forward FLOPs a token."""
        blocks = len(self.layers) * block_flops_per_token(model, seq)
        return blocks + self.first * model.hidden + self.last * head_flops_per_token(model)


def stages_of_rank(spec: RunSpec, pp_rank: int) -> list[Stage]:
    """Those that a rank of the pipeline holds; without a pipeline the one stage is the whole network."""
    layout = spec.parallel
    stages = split_layers(spec.model, spec.data.seq, layout.pp * layout.virtual_stages)
    return [stages[index] for index in stages_of(layout.schedule, layout.pp, layout.virtual_stages, pp_rank)]


def orders_of(spec: RunSpec) -> list[list[Action]]:
    """What every rank of a run's pipeline does in a step."""
    layout = spec.parallel
    return actions(layout.schedule, layout.pp, layout.virtual_stages, spec.accumulation)


def simulated(spec: RunSpec) -> list[Span]:
    """A step with the stages' costs, in forward passes of an average stage; messages take no time."""
    layout, model, seq = spec.parallel, spec.model, spec.data.seq
    costs = [stage.cost(model, seq) for stage in split_layers(model, seq, layout.pp * layout.virtual_stages)]
    mean = sum(costs) / len(costs)
    return simulate(orders_of(spec), stage_times(durations(layout.recompute), [cost / mean for cost in costs]))


@functools.cache
def split_layers(model: ModelSpec, seq: int, stages: int) -> tuple[Stage, ...]:
    """Contiguous runs of at least one layer. The largest cost is least; of such splits, the most even one."""
    if not 1 <= stages <= model.layers:
        raise SpecError(f"{stages} pipeline stages cannot be cut from model.layers = {model.layers}: use at most that")
    costs = [block_flops_per_token(model, seq)] * model.layers
    costs[0] += model.hidden  # a look-up: far below any GEMM, but it decides between equal cuts
    costs[-1] += head_flops_per_token(model)
    ends = most_even_split(costs, stages, limit=min_max_split(costs, stages))
    return tuple(
        Stage(index, range(begin, end), first=index == 0, last=index == stages - 1)
        for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    )


def min_max_split(costs: list[float], parts: int) -> float:
    """The smallest possible largest sum, when `costs` is cut into `parts` runs of at least one.

    best(n, k) = min over j of max(best(j, k − 1), costs[j] + … + costs[n − 1])
    """
    before = [*itertools.accumulate(costs, initial=0.0)]
    best = [0.0, *[math.inf] * len(costs)]
    for part in range(1, parts + 1):
        best = [math.inf] * part + [
            min(max(best[j], before[n] - before[j]) for j in range(part - 1, n)) for n in range(part, len(costs) + 1)
        ]
    return best[-1]


def most_even_split(costs: list[float], parts: int, limit: float) -> list[int]:
    """Where each run ends, in the cut with the least sum of squares of which no run costs more than `limit`."""
    before = [*itertools.accumulate(costs, initial=0.0)]
    allowed = limit * (1 + 1e-12)  # sums of the same numbers in another order
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(math.inf, [])] * len(costs)]
    for part in range(1, parts + 1):
        longer: list[tuple[float, list[int]]] = [(math.inf, [])] * part
        for n in range(part, len(costs) + 1):
            runs = [(j, before[n] - before[j]) for j in range(part - 1, n)]
            fitting = [(best[j][0] + run**2, best[j][1]) for j, run in runs if run <= allowed]
            squares, ends = min(fitting, key=lambda cut: cut[0], default=(math.inf, []))
            longer.append((squares, [*ends, n]))
        best = longer
    return best[-1][1]
