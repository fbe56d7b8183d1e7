"""Snapshots of a real allocator: what is read from the file is what torch.cuda.memory_stats says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.trace.memory import read_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20


def held() -> list[torch.Tensor]:
    """Ten blocks of 30 MiB, of which every second one is freed: holes that no request of 60 MiB fits into."""
    tensors = [torch.empty(30 * MIB + 300, dtype=torch.uint8, device="cuda") for _ in range(10)]
    return tensors[::2]


def test_snapshot_equals_memory_stats(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        kept = held()
        stats = torch.cuda.memory_stats()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = next(
        one for one in read_snapshot(tmp_path / "snapshot.pickle") if one.device == torch.cuda.current_device()
    )
    assert found.reserved_bytes == stats["reserved_bytes.all.current"]
    assert found.allocated_bytes == stats["allocated_bytes.all.current"]
    assert found.requested_bytes == stats["requested_bytes.all.current"]
    assert found.peak_bytes == stats["requested_bytes.all.peak"]
    assert found.free_bytes == found.reserved_bytes - stats["active_bytes.all.current"]
    assert 0 < found.fragmentation < 1
    largest = found.holders[0]
    assert "held" in largest.site and largest.bytes == 10 * (30 * MIB + 300)
    del kept
