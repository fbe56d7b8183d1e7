"""The tiers that an engine's spec asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .disk import DiskStore
from .fingerprint import fingerprint
from .shared_folder import SharedFolder
from .store import BlockStore
from .tiers import KVTiers

if TYPE_CHECKING:
    from ..core.model_runner import ModelRunner

GIB = 2**30


def open_tiers(runner: ModelRunner) -> KVTiers | None:
    """None where `engine.kv_host_gib` is 0."""
    spec = runner.spec
    if not spec.kv_host_gib:
        return None
    caches = [runner.cache, *([] if runner.draft is None else [runner.draft.cache])]
    stores: list[tuple[str, BlockStore]] = []
    if spec.kv_disk:
        stores.append(("disk", DiskStore(Path(spec.kv_disk), int(spec.kv_disk_gib * GIB))))
    if spec.kv_shared:
        stores.append(("shared", SharedFolder(Path(spec.kv_shared), int(spec.kv_shared_gib * GIB))))
    return KVTiers(caches, fingerprint(runner), int(spec.kv_host_gib * GIB), stores)
