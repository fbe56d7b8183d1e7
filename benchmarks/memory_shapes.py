"""The memory sheet against simulated ranks, for shapes of today: dense, experts, latent attention with experts.

    python benchmarks/memory_shapes.py      # prints a table and writes results/memory_shapes.json

A simulated rank (`lmworks prove simulate`) is laid out and stepped on tensors without numbers; its peak counts every
tensor. Models are small, with the proportions of the large ones: heads wider than the residual stream, narrow experts.
"""

from __future__ import annotations

from typing import Any

from common import write_result

from lmworks.plan.memory.sheet import memory
from lmworks.prove.simulate import simulate
from lmworks.spec import RunSpec

COMMON = {"layers": 8, "vocab": 2048, "context": 2048}
EXPERTS = {"experts": 16, "top_k": 4}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 192, "rope_head_dim": 64, "v_head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"hidden": 288, "heads": 8, "kv_heads": 1, "head_dim": 64, "ffn": 768},
    "Qwen3-MoE's shape": {
        "hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "qk_norm": True, **EXPERTS, "expert_ffn": 96,
    },
    "DeepSeek-V3's shape": {
        "hidden": 512, "heads": 16, "kv_heads": 16, "head_dim": 128, **LATENT, **EXPERTS, "expert_ffn": 128,
        "shared_experts": 1,
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "fsdp2": {"dp": 4, "strategy": "fsdp2"},
    "fsdp2, full recompute": {"dp": 4, "strategy": "fsdp2", "recompute": "full"},
    "cp": {"cp": 2},
    "tp, sp": {"tp": 2, "sp": True},
}


def error(model: dict[str, Any], layout: dict[str, Any]) -> float:
    """Planned over simulated peak bytes of tensors, minus 1; bf16, 4 × 1,024 tokens."""
    spec = RunSpec.from_dict({"model": {**COMMON, **model}, "parallel": layout, "precision": {"dtype": "bf16"}})
    data = spec.data.replace(seq=1024, micro_batch=4, global_batch=4 * spec.parallel.dp)
    spec = spec.replace(data=data)
    return float(memory(spec, "cpu", copies=1).tensors / simulate(spec, 0, exact=True).simulation.peak_bytes - 1)


def main() -> None:
    rows = {name: {layout: error(model, LAYOUTS[layout]) for layout in LAYOUTS} for name, model in MODELS.items()}
    for name, errors in rows.items():
        print(f"{name:20}", "  ".join(f"{layout} {value:+.1%}" for layout, value in errors.items()))
    write_result("memory_shapes", {"rows": rows})


if __name__ == "__main__":
    main()
