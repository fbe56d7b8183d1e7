"""The tiers that an engine's spec asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...spec import EngineSpec
from .disk import DiskStore
from .fingerprint import fingerprint
from .shared_folder import SharedFolder
from .socket_store import SocketStore
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
        stores.append(("shared", open_shared(spec)))
    tiers = KVTiers(caches, fingerprint(runner), int(spec.kv_host_gib * GIB), stores)
    if spec.kv_listen:
        tiers.listen(spec.kv_listen)
    for address in spec.kv_peers:
        tiers.connect(address)
    return tiers


def open_shared(spec: EngineSpec) -> BlockStore:
    """A folder, or the address of `lmworks kv-store`."""
    if "://" in spec.kv_shared:
        return SocketStore(spec.kv_shared)
    return SharedFolder(Path(spec.kv_shared), int(spec.kv_shared_gib * GIB))
