"""Memory beside the planner's sheets."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row


def model_states(budget: ModuleType) -> list[Row]:
    """The planner's sheet also has Adam's step counters, four bytes a tensor."""
    from ...plan.memory.rank_weights import resident
    from ...spec import RunSpec, components

    rows = []
    for stage in range(4):
        strategy = {0: {"dp_replicate": 4}, 3: {"strategy": "fsdp2", "dp_shard": 4}}.get(
            stage, {"strategy": "zero", "dp_shard": 4, "zero": stage}
        )
        spec = RunSpec.from_dict({"model": {"preset": "tiny"}, "parallel": strategy})
        found, weights = resident(spec, 0), components.weights(spec.model)
        states = budget.model_states(sum(one.size for one in weights), 4, stage, "fp32")
        planned = found.parameters + found.gradients + found.optimizer - 4 * len(weights)
        rows.append(Row(f"tiny in fp32, 4 ranks, ZeRO-{stage}: bytes", sum(states.values()), planned))
    return rows


def kv_cache_bytes(budget: ModuleType) -> list[Row]:
    from ...plan.serving.served_model import Cache
    from ...spec import ModelSpec

    rows = []
    for name in ("llama3-8b", "llama3-70b"):
        model = ModelSpec.from_dict({"preset": name})
        arguments = model.layers, model.heads, model.kv_heads, model.hidden
        yours = budget.kv_cache_bytes(*arguments, [1000] * 8)
        rows.append(Row(f"{name}, 8 sequences of 1,000 tokens: bytes", yours, 8 * float(Cache.of(model).held(1000))))
    return rows


BESIDE: dict[str, Beside] = {
    "model_states": model_states,
    "kv_cache_bytes": kv_cache_bytes,
}
