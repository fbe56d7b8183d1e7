"""The tiers that an engine's spec asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...spec import EngineSpec
from .device_copies import DeviceCopies
from .disk import DiskStore
from .host_memory import HostMemory
from .rank_copies import BlockLayout, HostMapping, RankCopies, block_layout, caches_of
from .shared_folder import SharedFolder
from .socket_store import SocketStore
from .store import BlockStore
from .tiers import Copies, KVTiers

if TYPE_CHECKING:
    from ..core.model_runner import ModelRunner

GIB = 2**30


def open_tiers(runner: ModelRunner) -> KVTiers | None:
    """None where `engine.kv_host_gib` is 0."""
    spec = runner.spec
    if not spec.kv_host_gib:
        return None
    layout = block_layout(runner)
    stores: list[tuple[str, BlockStore]] = []
    if spec.kv_disk:
        stores.append(("disk", DiskStore(Path(spec.kv_disk), int(spec.kv_disk_gib * GIB))))
    if spec.kv_shared:
        stores.append(("shared", open_shared(spec)))
    host, copies = open_host(runner, layout)
    tiers = KVTiers(host, copies, layout.fingerprint, stores)
    if spec.kv_listen:
        tiers.listen(spec.kv_listen)
    for address in spec.kv_peers:
        tiers.connect(address)
    return tiers


def open_host(runner: ModelRunner, layout: BlockLayout) -> tuple[HostMemory, Copies]:
    size, pinned = int(runner.spec.kv_host_gib * GIB), runner.device.type == "cuda"
    host = HostMemory(size, layout.block_bytes, pinned, shared=runner.tp_rank is not None)
    own = DeviceCopies(caches_of(runner), host.memory[:, : layout.shards[0].end])
    if runner.tp_rank is None:
        return host, own
    from ..tensor_parallel.executor import Executor  # imported here: torch.distributed takes seconds to load

    assert isinstance(runner.tp_rank, Executor)
    mappings = [HostMapping(host.path, host.num_slots, layout.block_bytes, shard) for shard in layout.shards]
    runner.tp_rank.map_host_memory(mappings[1:])
    host.close_file()
    return host, RankCopies(own, runner.tp_rank)


def open_shared(spec: EngineSpec) -> BlockStore:
    """A folder, or the address of `lmworks kv-store`."""
    if "://" in spec.kv_shared:
        return SocketStore(spec.kv_shared)
    return SharedFolder(Path(spec.kv_shared), int(spec.kv_shared_gib * GIB))
