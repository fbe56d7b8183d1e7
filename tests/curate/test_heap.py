"""Memory that one long document takes, while it is worked on and afterwards."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from lmworks.curate.documents import Document
from lmworks.curate.statistics import Statistics

GROWN = """
from lmworks.curate.heap import return_large_buffers
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
return_large_buffers()
before, kept = resident(), []
for size in (2, 4, 8, 6, 4, 2):  # the documents; between them what stays, as keys of a part do
    large = [bytes(size << 20) for _ in range(3)]
    large = [one + one for one in large]
    kept.append(bytes(2000))
    del large
print(resident() - before)
"""


def test_statistics_of_a_long_document_take_no_multiple_of_it() -> None:
    raw = bytes(range(32, 127)) * 20_000
    document = Document("a.txt", raw.decode(), {"path": "a.txt"})
    statistics = Statistics("bytes")
    tracemalloc.start()
    try:
        statistics.add(document, raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20  # np.bincount would have made 8 bytes of each: 15 MB
    assert statistics.tokens.tolist() == [0] * 32 + [20_000] * 95 + [0] * 129


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_what_a_long_document_took_goes_back() -> None:
    grown = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 6 * 2**20
