"""What pays within a step: options of PyTorch's compiler and ways of a product, each beside a step with none of them.

    python benchmarks/compile_options.py                                     GPT-2 on one GPU, about 30 s an option
    python benchmarks/compile_options.py --only plain,"launched early" --times 2
    python benchmarks/compile_options.py --steps 5 tiny cluster.device=cpu   another run

Every option is a process of its own. Plain runs first and last: what lies between the two is noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch._inductor.config
from common import commit, write_result

from lmworks.bench.power import power_text
from lmworks.bench.train import bench_train
from lmworks.kernels import dispatch
from lmworks.spec import load_run

GPT2 = [
    "gpt2-small", "model.vocab=50304", "model.bias=false", "data.micro_batch=64", "data.seq=1024",
    "precision.dtype=bf16", "precision.weights=bf16", "cluster.device=cuda",
]  # fmt: skip
PLAIN = "plain"
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "launched early": {"triton.enable_pdl": True},
    "more tiles of pointwise kernels": {"max_autotune_pointwise": True},
    "tiles by descent": {"coordinate_descent_tuning": True},
    "both sums of a norm's gradient tuned": {"triton.mix_order_reduction_autotune_split_size": True},
    "both sums of a norm's gradient in stages": {"triton.mix_order_reduction_allow_multi_stages": True},
    "sums of a norm's gradient apart": {"triton.mix_order_reduction": False},
}
ALGORITHMS = {  # of ops of ours; others as `lmworks bench kernels` found them
    "GELU as cuBLAS would": {"linear_gelu": "cublas 0"},
    "GELU's gradient as cuBLAS would": {"linear_dgelu": "cublas 0"},
    "GELU's gradient by its third way": {"linear_dgelu": "cublas 2"},
    "the sum after the MLP apart": {"linear_add": "torch"},
    "GELU apart": {"linear_gelu": "torch"},
    "the sum after attention apart": {"linear_sum": "torch"},
}
OPTIONS |= {name: {} for name in ALGORITHMS}
LIMIT_S = 150


def run(option: str, arguments: list[str], steps: int) -> dict[str, Any]:
    """In this process."""
    for op, way in ALGORITHMS.get(option, {}).items():
        measured = [ops for ops in dispatch.table().values() if op in ops]
        if not measured:
            sys.exit(f"{op} was not measured on any device, and PyTorch does it anyway: lmworks bench kernels --record")
        for ops in measured:
            ops[op] = dict.fromkeys(ops[op], way)
    for key, value in OPTIONS[option].items():
        setattr(torch._inductor.config, key, value)  # of which an older compiler may have none
    facts = bench_train(load_run(arguments[0], [*arguments[1:], "parallel.compile=true"]), steps)
    assert facts is not None
    return {key: facts[key] for key in ("step_s", "step_s_range", "tokens_per_s", "warm_up_s", "power")}


def run_apart(option: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", option, "--steps", str(options.steps), *options.spec]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {LIMIT_S} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][-300:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="*", default=GPT2)
    parser.add_argument("--only", default=",".join(OPTIONS), help="names, with commas between them")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--times", type=int, default=1, help="go through all of them so often")
    parser.add_argument("--one", help="a single option in this process; prints JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.spec, options.steps)))
        return
    names = options.only.split(",")
    if unknown := [name for name in names if name not in OPTIONS]:
        parser.error(f"--only: there is no {', '.join(unknown)}; use some of {', '.join(OPTIONS)}")
    found, first = [], None
    for name in [*names * options.times, PLAIN]:
        began = time.perf_counter()
        facts = run_apart(name, options)
        found.append({"option": name, "set": OPTIONS[name] | ALGORITHMS.get(name, {}), **facts, "commit": commit()})
        first = first or facts.get("step_s")
        told = facts.get("failed") or f"{1e3 * facts['step_s']:.2f} ms, {facts['step_s'] / first:.4f} of the first"
        if power := facts.get("power"):
            told += f", {power['clock_mhz']:,.0f} MHz {power_text(power)}"
        print(f"{name}: {told} ({time.perf_counter() - began:.0f} s in all)", flush=True)
        if options.spec == GPT2:
            write_result("compile_options", {"spec": options.spec, "steps": options.steps, "found": found})


if __name__ == "__main__":
    main()
