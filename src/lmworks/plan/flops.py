"""FLOPs of a model: what it needs (model FLOPs) and what the kernels really do (hardware FLOPs).

Model FLOPs are the yardstick of MFU: 2 per weight that a token is multiplied with (the head counts, the input
embedding is a look-up), plus attention over the keys that a query may see, causal or windowed, counted once;
the backward pass is twice the forward pass; nothing that is computed again counts. Hardware FLOPs add what is
computed again. Norms, activations, softmax and the optimizer are bound by memory, not by FLOPs: they are left out.
"""

from __future__ import annotations

from ..spec import ModelSpec, RunSpec, components
from ..spec.components import Attention
from ..spec.lora import block_adapter_weights


def keys_per_query(seq: int, window: int = 0) -> float:
    """Mean over the positions t = 1 … seq of min(t, window): the keys that causal attention must look at."""
    reach = min(window or seq, seq)
    return (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq


def mean_keys_per_query(core: Attention, seq: int) -> float:
    """Mean over the layers too, where some have a window and others have none."""
    keys = keys_per_query(seq, core.window)
    return keys + core.full_share * (keys_per_query(seq) - keys) if core.full_share else keys


def block_flops_per_token(model: ModelSpec, seq: int) -> float:
    """Forward, one layer; the mean of all, where they differ in attention."""
    core = components.attention_core(model)
    return 2 * model.block_matmul_params + core.flops_per_key * mean_keys_per_query(core, seq)


def head_flops_per_token(model: ModelSpec) -> float:
    """Forward."""
    return 2 * model.head_outputs * model.hidden


def attention_flops_per_token(model: ModelSpec, seq: int) -> float:
    """Forward, all layers."""
    core = components.attention_core(model)
    return model.layers * core.flops_per_key * mean_keys_per_query(core, seq)


def forward_flops_per_token(model: ModelSpec, seq: int) -> float:
    """Evaluation: one forward pass with its loss."""
    return 2 * model.matmul_params + attention_flops_per_token(model, seq)


def model_flops_per_token(model: ModelSpec, seq: int) -> float:
    """Training: forward, and a backward pass of twice as much (one product for inputs, one for weights)."""
    return 3 * forward_flops_per_token(model, seq)


def adapted_flops_per_token(model: ModelSpec, seq: int, adapters: tuple[components.Weight, ...]) -> float:
    """Training with these adapters in every block, or of all weights without any.

    Frozen weights have no gradient of their own, 4 FLOPs of 6; adapters have 6.
    """
    whole = model_flops_per_token(model, seq)
    if not adapters:
        return whole
    matrices = sum(weight.size for weight in adapters if len(weight.shape) > 1)
    return whole - 2 * model.matmul_params + 6 * model.layers * matrices


def run_flops_per_token(spec: RunSpec) -> float:
    """Model FLOPs of a run."""
    active = tuple(block_adapter_weights(spec.model, spec.lora, spec.adapters[:1]))
    return adapted_flops_per_token(spec.model, spec.data.seq, active)


def hardware_flops_per_token(model: ModelSpec, seq: int, recompute: str = "none") -> float:
    """Model FLOPs and what is computed again.

    Flash attention computes q·kᵀ again in its backward pass: half its forward FLOPs. `full` recompute runs every
    block forward a second time, the head excepted; `selective` keeps every product, so it adds none; `mlp` runs those
    of the MLP again, but for the last, or experts whole.
    """
    attention = attention_flops_per_token(model, seq)
    again = attention / 2
    if recompute == "full":
        again += 2 * model.layers * model.block_matmul_params + attention
    if recompute == "mlp":
        for kind, count in model.kinds:
            inner = (w for w in components.block_weights(kind) if w.name.startswith("mlp."))
            rerun = (w for w in inner if w.experts or w.init != "residual")
            again += 2 * count * sum(w.matmul_token_share * w.size for w in rerun)
    return model_flops_per_token(model, seq) + again
