"""The same model under every data-parallel strategy: speed, memory, messages, start, checkpoint, death of a rank."""

from __future__ import annotations

from typing import Any

# As people call them → changes to `parallel`.
STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": {"strategy": "ddp"},
    "FSDP1 full": {"strategy": "fsdp1", "reshard": True},
    "FSDP1 grad-op": {"strategy": "fsdp1", "reshard": False},
    "FSDP2 reshard": {"strategy": "fsdp2", "reshard": True},
    "FSDP2 keep": {"strategy": "fsdp2", "reshard": False},
    "ZeRO-1": {"strategy": "zero", "zero": 1},
    "ZeRO-2": {"strategy": "zero", "zero": 2},
    "ZeRO-3": {"strategy": "zero", "zero": 3, "reshard": True},
}
