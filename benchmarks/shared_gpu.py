"""Two servers on one GPU against one: with the GPU's time slices, and with CUDA MPS where its daemon is there.

    python benchmarks/shared_gpu.py            # llama3-1b (random weights)
    python benchmarks/shared_gpu.py --small    # a tiny model on a CPU: without MPS

Behind the gateway, least loaded first. Processes without MPS take turns on the whole GPU; with it their kernels run
side by side. MPS is a daemon of the driver's package (nvidia-cuda-mps-control) on the PATH; the GPU's compute mode is
left as it is. All cases get the same requests, as closed loops: one stream a server, many answers, long prompts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: here, and in the servers that are started

from common import write_result
from local_fleet import MODEL, LocalFleet, fleet_up

from lmworks.bench.serve import Slo, bench_serve
from lmworks.bench.workload import Arrivals, Lengths, Load

CONTROL = "nvidia-cuda-mps-control"
GPU_LOADS = {
    "two streams": Load(8, Arrivals(concurrency=2), Lengths((128, 128), (256, 256))),
    "64 answers at once": Load(256, Arrivals(concurrency=64), Lengths((128, 128), (256, 256))),
    "16 long prompts at once": Load(64, Arrivals(concurrency=16), Lengths((4096, 4096), (16, 16))),
}
SMALL_LOADS = {"two streams": Load(4, Arrivals(concurrency=2), Lengths((16, 16), (8, 8)))}


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The daemon; the environment of processes that use it."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        environment = {**os.environ, **place}
        subprocess.run([CONTROL, "-d"], env=environment, check=True)
        try:
            yield place
        finally:
            subprocess.run([CONTROL], input=b"quit -t 10\n", env=environment, check=True)


def mps_clients(place: dict[str, str]) -> int:
    """Processes that run through it: a client that cannot reach the daemon's server would run without it."""

    def asked(words: str) -> list[str]:
        told = subprocess.run([CONTROL], input=words, env={**os.environ, **place}, capture_output=True, text=True)
        return told.stdout.split()

    return sum(len(asked(f"get_client_list {server}\n")) for server in asked("get_server_list\n"))


def measure(fleet: LocalFleet, loads: dict[str, Load]) -> dict[str, Any]:
    rows = {}
    for name, load in loads.items():
        for seed in (1, 2):  # the first one warms up
            found = bench_serve(fleet.gateway, load_of(load, seed), Slo(), model=MODEL).to_dict()
        rows[name] = {
            key: found[key]
            for key in ("output_tokens_per_s", "requests_per_s", "ttft_s", "request_itl_s", "errors", "rejected")
        }
        first, gap = found["ttft_s"], found["request_itl_s"]
        print(f"  {name}: {found['output_tokens_per_s']:.0f} tokens/s, {found['requests_per_s']:.1f} requests/s, "
              f"TTFT p50 {1e3 * first['p50']:.1f} ms, p99 {1e3 * first['p99']:.1f} ms, "
              f"TPOT p50 {1e3 * gap['p50']:.2f} ms {found['errors'] or ''}", flush=True)  # fmt: skip
    return rows


def load_of(load: Load, seed: int) -> Load:
    return Load(load.requests, load.arrivals, load.lengths, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU; nothing is saved")
    small = parser.parse_args().small
    model, loads = ("tiny", SMALL_LOADS) if small else ("llama3-1b", GPU_LOADS)
    options = [] if small else ["engine.context=8192", "engine.blocks=20000", "engine.max_seqs=64"]
    found: dict[str, Any] = {"model": model, "options": options, "cases": {}}

    def case(name: str, servers: int, place: dict[str, str] | None = None) -> None:
        print(name, flush=True)
        with fleet_up(model, servers, options, {}, place) as fleet:
            if place is not None:
                found["mps_clients"] = mps_clients(place)
                print(f"  {found['mps_clients']} processes run through MPS", flush=True)
            found["cases"][name] = measure(fleet, loads)
        if not small:
            write_result("shared_gpu", found)

    case("one server", 1)
    case("two servers", 2)
    if shutil.which(CONTROL) is None:
        found["mps"] = f"{CONTROL} is not on this machine"
        print(found["mps"])
    else:
        with mps() as place:
            case("two servers, MPS", 2, place)
    if not small:
        print(write_result("shared_gpu", found))


if __name__ == "__main__":
    main()
