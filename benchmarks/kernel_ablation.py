"""What each hand-written kernel gains in a whole training step: the step with it, and with PyTorch's in its place.

    python benchmarks/kernel_ablation.py                    every row on one GPU, about 8 minutes
    python benchmarks/kernel_ablation.py --row gpt2 --steps 10

Rows are those of docs/bench-train.md, compiled, and one eager row, in which norms, rotations and activations are our
kernels too. Each variant replaces some ops by PyTorch's, as if they had never been measured (kernels/dispatch.py). The
first and the last run of a row are the step as it is: their difference is the noise. A row is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import torch
from common import RESULTS, write_result
from train_gpu import CHANCE, COMPILE, EIGHT, HALF

from lmworks.bench.train import bench_train
from lmworks.kernels import dispatch
from lmworks.spec import load_run

LOSS = {"loss in place": ("linear_cross_entropy",)}
LLAMA = ("llama3-1b", "data.micro_batch=4", "data.seq=4096", *CHANCE)
ROWS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "gpt2": (
        ("gpt2-small", "model.vocab=50304", "model.bias=false", "data.micro_batch=64", "data.seq=1024", COMPILE, *HALF),
        {
            **LOSS,
            "GELU and sums in cuBLASLt": ("linear_gelu", "linear_dgelu", "linear_add"),
        },
    ),
    "1b": ((*LLAMA, COMPILE), LOSS),
    "1b-eager": (
        (*LLAMA, "parallel.compile=false"),
        {
            "RMSNorm": ("rms_norm",),
            "RoPE": ("rope",),
            "SwiGLU": ("swiglu",),
        },
    ),
    "8b-fp8": (
        ("llama3-8b", "data.micro_batch=2", "data.seq=8192", COMPILE, *EIGHT, "precision.fp8_head=true"),
        {"SwiGLU in fp8": ("swiglu_fp8",), "fp8 quantization": ("quantize", "quantize_rows", "dequantize"), **LOSS},
    ),
}
AS_IT_IS = "as it is"


def measure(row: str, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, by variant."""
    words, variants = ROWS[row]
    spec = load_run(words[0], words[1:])
    found: dict[str, list[float]] = {}
    for name, ops in [(AS_IT_IS, ()), *variants.items(), (AS_IT_IS, ())]:
        usual = dispatch.fastest

        def fastest(
            op: str, device: torch.device, *, ops: tuple[str, ...] = ops, usual: Any = usual, **shape: int
        ) -> str:
            return dispatch.TORCH if op in ops else usual(op, device, **shape)

        fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]
        with mock.patch.object(dispatch, "fastest", fastest):
            began = time.time()
            facts = bench_train(spec, steps)
        assert facts is not None
        found.setdefault(name, []).append(facts["step_s"])
        print(
            f"{row}: {name}: {facts['step_s'] * 1e3:.2f} ms ({time.time() - began:.0f} s)", file=sys.stderr, flush=True
        )
        del facts
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=ROWS, action="append")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--here", action="store_true", help="this process measures the row")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure(asked.row[0], asked.steps)))
        return
    path = RESULTS / "kernel_ablation.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for row in asked.row or ROWS:
        command = [sys.executable, __file__, "--here", "--row", row, "--steps", str(asked.steps)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            print(f"{row}: failed ({ended.returncode})")
            continue
        times = json.loads(ended.stdout.splitlines()[-1])
        base = sum(times[AS_IT_IS]) / len(times[AS_IT_IS])
        noise = abs(times[AS_IT_IS][0] - times[AS_IT_IS][-1]) / base
        rows[row] = {"ms": base * 1e3, "noise": noise, "gain": {}}
        print(f"{row}: {base * 1e3:.2f} ms, two runs {noise:.2%} apart")
        for name, (took,) in ((name, times[name]) for name in times if name != AS_IT_IS):
            rows[row]["gain"][name] = took / base - 1
            print(f"  {name:34} {took / base - 1:+.2%}")
        write_result("kernel_ablation", {"rows": rows})


if __name__ == "__main__":
    main()
