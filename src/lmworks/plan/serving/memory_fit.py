"""What fits on one accelerator of a replica: weights, the engine's own needs, and the rest for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..memory.reserve import capacity, reserve
from .inference import Deployment

UTILISATION = 0.9  # of the memory is what engines take by default; the rest is left to fragmentation and neighbours
SAMPLED_SEQUENCES = 256  # sequences whose logits the engine makes room for at once


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on one accelerator. `cache` is what is left; below 0 the weights alone do not fit."""

    memory: float
    usable: float
    weights: float
    workspace: float
    context: float  # CUDA's, its kernels, NCCL

    @property
    def cache(self) -> float:
        return self.usable - self.weights - self.workspace - self.context


def serving_memory(deployment: Deployment) -> ServingMemory:
    memory = capacity(deployment.gpu)
    return ServingMemory(
        memory, UTILISATION * memory, deployment.weight_bytes, workspace(deployment), reserve().context
    )


def workspace(deployment: Deployment) -> float:
    """Activations of the largest step: residual streams, the widest product's ends, and fp32 logits to sample from."""
    served, tp = deployment.served, deployment.tp
    widest = max(sum(linear.on(tp)) for linear in served.linears)
    if served.experts:  # every visit has its own copy of a token, in and out
        inner = served.experts.size / served.hidden  # gate, up and down of one expert
        widest = max(widest, served.experts.top_k * (2 * served.hidden + inner / deployment.ranks))
    logits = 4.0 * SAMPLED_SEQUENCES * served.head.on(tp)[1]
    return 2.0 * deployment.chunk * (4 * served.hidden + 1.5 * widest) + logits
