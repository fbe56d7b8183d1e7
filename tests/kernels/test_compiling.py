"""Launches that only compile: through Triton's own compiler, for a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

# A driver whose kernels do nothing but say that they were launched, and with what loaded.
DRIVER = """
import json, threading
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from lmworks.kernels.triton_support import compiled_kernels

built, launched = [], []

class Launcher:
    def __init__(self, src, metadata):
        self.name = src.fn.__name__
        built.append([self.name, threading.current_thread().name])
    def __call__(self, x, y, z, stream, function, *rest):
        launched.append([self.name, function])

class Utils:
    def load_binary(self, name, kernel, shared, device):
        return 1, f"loaded {name}", 32, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448}

class Driver:
    launcher_cls, utils = Launcher, Utils()
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
"""

APART = """
from lmworks.kernels.triton_support import compile_only

@triton.jit
def twice(n, TILE: tl.constexpr):
    tl.device_assert(n + tl.sum(tl.arange(0, TILE)) > 0)

@triton.jit
def wrong(n, TILE: tl.constexpr):
    tl.dot(n, TILE)

def other():
    twice[(1,)](7, TILE=64)

with compile_only():
    for _ in range(3):
        twice[(1,)](7, TILE=16)
        twice[(1,)](7, TILE=32)
    inside = list(launched)
    thread = threading.Thread(target=other, name="other")
    thread.start()
    thread.join()
    beside = list(launched)
made = list(built)
twice[(1,)](7, TILE=16)
twice[(1,)](7, TILE=32)
try:
    with compile_only():
        wrong[(1,)](7, TILE=16)
    failed = ""
except Exception as error:
    failed = type(error).__name__
# Two that overlap, the first to come being the first to go; then a thread with the number of the first.
entered, left = threading.Event(), threading.Event()
before = len(launched)

def first():
    with compile_only():
        entered.set()
        left.wait()

def second():
    with compile_only():
        left.set()
        one.join()

one, two = threading.Thread(target=first), threading.Thread(target=second)
one.start(); entered.wait(); two.start(); two.join()
threads = [threading.Thread(target=other) for _ in range(3)]
for thread in threads:
    thread.start(); thread.join()
later = len(launched) - before
with compiled_kernels() as met:
    twice[(1,)](7, TILE=64)
    twice[(1,)](7, TILE=128)
twice[(1,)](7, TILE=256)
told = {"inside": inside, "beside": beside, "made": made, "built": built, "launched": launched, "failed": failed}
print(json.dumps({**told, "later": later, "met": met}))
"""


# A step of any number of tokens and sequences, after steps of others: as prompts come.
ANY_NUMBER = """
from lmworks.kernels import rms_norm_triton
from lmworks.kernels.inference import gumbel_sample_triton
from lmworks.kernels.inference.gumbel_sample import RowParams

def norm(rows, delta):
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    rms_norm_triton.forward(x, x if delta else None, torch.ones(256, dtype=torch.bfloat16), 1e-5)

def draw(rows):
    logits, slots = torch.zeros(rows, 9000), torch.zeros(rows, dtype=torch.int64)  # three spans
    table = RowParams(torch.zeros(4), torch.zeros(4, dtype=torch.int64), slots, slots)
    gumbel_sample_triton.launch(logits, logits, table, True)

told, works = {}, {"norm": lambda rows: norm(rows, False), "added": lambda rows: norm(rows, True), "draw": draw}
for name, work in works.items():
    work(64)
    with compiled_kernels() as met:
        for rows in (1, 2, 3, 24, 77):
            work(rows)
    told[name] = met
print(json.dumps(told))
"""


def told_by(script: str, folder: Path) -> dict[str, Any]:
    file = folder / "script.py"  # kernels are read from their file
    file.write_text(script, encoding="utf-8")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow  # compiles for every step size
def test_any_step_size_uses_compiled_kernels(tmp_path: Path) -> None:
    """Triton compiles once more for numbers that divide by 16, for 1, and for addresses that do: half a second each,
    in the middle of an answer."""
    assert told_by(DRIVER + ANY_NUMBER, tmp_path) == {"norm": [], "added": [], "draw": []}


@pytest.mark.slow
def test_launches_compile_in_parallel_without_running(tmp_path: Path) -> None:
    told = told_by(DRIVER + APART, tmp_path)
    assert told["inside"] == []
    assert told["beside"] == [["twice", "loaded twice"]]  # another thread launches as ever
    assert sorted(told["made"]) == [["twice", "other"], *[["twice", "triton-compile"]] * 2]  # each once
    assert told["built"][:3] == told["made"]  # so that nothing is left to do at the launch
    assert told["launched"] == [["twice", "loaded twice"]] * 9
    assert told["failed"] == "CompilationError"
    assert told["met"] == ["twice"]  # the one that was not there yet
    assert told["later"] == 3  # nobody who comes after two that overlapped only compiles
