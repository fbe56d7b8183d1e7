"""What a prefix hit in each tier of the KV cache takes, against computing the prompt again, and what the planner says.

Of prompts of several lengths, the time to the first token: computed; with its blocks in the device's cache, in host
memory, on disk, in a shared folder, at a prefill engine, at a server of blocks over TCP (loopback). Each prompt takes
all turns, so a busy machine slows all of them. Reads of a disk come from the page cache. Blocks are written by one
thread, which may be behind by a quarter of host memory: longer prompts are measured in host memory alone.

    python benchmarks/kv_tiers.py                                    # a small model on a CPU, half a minute
    python benchmarks/kv_tiers.py --model llama3-3b --lengths 1024 4096 16384 65536 --gib 9 --repeats 3    # an H200
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_result

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.kv_tiers.disk import DiskStore
from lmworks.engine.kv_tiers.open import GIB, open_tiers
from lmworks.engine.kv_tiers.socket_store import BlockServer
from lmworks.engine.kv_tiers.store import checksum
from lmworks.engine.kv_tiers.tiers import WRITE_SHARE, KVTiers
from lmworks.loading import load_engine
from lmworks.model import GPT
from lmworks.plan.serving.inference import Deployment, Rates
from lmworks.plan.serving.kv_tiers import fetch_seconds, fitted_line, links_of, prefill_seconds
from lmworks.plan.serving.served_model import ServedModel
from lmworks.spec import EngineSpec, ModelSpec, catalogue
from lmworks.spec.hardware import find_gpu_name

BLOCK = 16
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
CPU_MODEL = {"layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 1024, "context": 4096}
PLANNED = {"host": "host", "disk": "disk", "shared folder": "disk", "prefill engine": "peer", "kv-store": "shared"}


def small_engine(spec: EngineSpec) -> Engine:
    model = ModelSpec(**CPU_MODEL)
    runner = ModelRunner(GPT(model, seed=0).eval(), spec, "cpu", model.vocab)
    return Engine(runner, tiers=open_tiers(runner))


def tiers_of(engine: Engine) -> KVTiers:
    assert isinstance(engine.tiers, KVTiers)
    return engine.tiers


def first_token(engine: Engine, prompt: list[int], remote: str | None = None) -> tuple[float, int]:
    """Seconds, and tokens that were found."""
    begin = time.perf_counter()
    engine.add(request := Request(list(prompt), ONE, kv_remote=remote))
    [result] = [delta.result for delta in engine.run() if delta.request is request and delta.result]
    return time.perf_counter() - begin, result.cached_tokens


def forget_device(engine: Engine) -> None:
    engine.scheduler.block_manager.reset_prefix_cache()


def forget_host(engine: Engine) -> None:
    """What waits to be written is written first."""
    if not tiers_of(engine).flush(60):
        raise SystemExit("blocks were not written within a minute")
    forget_device(engine)
    tiers_of(engine).host.clear()


class Engines:
    """One that computes and keeps blocks below its device, one that takes them from it, one over a `kv-store`."""

    def __init__(self, model: str, root: Path, context: int, gib: float) -> None:
        self.server = BlockServer("tcp://127.0.0.1:0", DiskStore(root / "server", int(gib * GIB)))
        self.server.start()
        common = {
            "kv_host_gib": gib, "max_seqs": 4, "context": context, "block": BLOCK, "blocks": context // BLOCK + 64
        }  # fmt: skip

        def make(**options: Any) -> Engine:
            if model:
                return load_engine(model, EngineSpec.from_dict({**common, **options}), None, 0)[1]
            return small_engine(EngineSpec.from_dict({**common, "device": "cpu", "dtype": "fp32", **options}))

        disk = {"kv_disk": str(root / "disk"), "kv_disk_gib": gib, "kv_shared": str(root / "shared")}
        self.source = make(kv_listen="tcp://127.0.0.1:0", **disk)
        self.address = tiers_of(self.source).address
        self.decode = make(kv_peers=[self.address])
        self.store = make(kv_peers=[self.address], kv_shared=self.server.address)

    @property
    def all(self) -> list[Engine]:
        return [self.source, self.decode, self.store]

    def close(self) -> None:
        for engine in self.all:
            engine.close()
        self.server.server_close()

    def turns(self, prompt: list[int], written: bool) -> dict[str, float]:
        """Seconds of each tier; `written`: tiers below host memory, too."""
        tiers, found = tiers_of(self.source), dict[str, float]()
        found["computed"], _ = first_token(self.source, prompt)
        found["device"] = hit(self.source, prompt)
        forget_device(self.source)
        found["host"] = hit(self.source, prompt)
        if written:
            forget_host(self.source)
            found["disk"] = hit(self.source, prompt)
            forget_host(self.source)
            tiers.stores[0][1].clear()  # type: ignore[attr-defined]
            found["shared folder"] = hit(self.source, prompt)
            found["prefill engine"] = hit(self.decode, prompt, self.address)
            hit(self.store, prompt, self.address)  # which writes to the kv-store
            forget_host(self.store)
            found["kv-store"] = hit(self.store, prompt)
        for engine in self.all:
            forget_host(engine)
        return found


def hit(engine: Engine, prompt: list[int], remote: str | None = None) -> float:
    seconds, found = first_token(engine, prompt, remote)
    if found < len(prompt) - BLOCK:
        raise SystemExit(f"{found} of {len(prompt)} tokens were found; errors: {tiers_of(engine).counts.errors}")
    return seconds


def checksum_rate() -> float:
    """Bytes/s of one thread: what every tier below host memory is limited by."""
    block, begin = bytes(64 * 2**20), time.perf_counter()
    checksum(block)
    return len(block) / (time.perf_counter() - begin)


def planned(model: str, lengths: list[float]) -> dict[str, list[float]]:
    """The planner's seconds for each length; links of a disk and a network as fast as checksums allow."""
    name = find_gpu_name(torch.cuda.get_device_name().removeprefix("NVIDIA "))
    served = ServedModel.of(ModelSpec.from_preset(model), model)
    deployment = Deployment(served, catalogue()[name], Rates.of("vllm"))
    links = {link.name: link for link in links_of(deployment, 5.0, 5.0)}
    token_bytes = float(deployment.cache.token_bytes)
    return {
        "computed": [prefill_seconds(deployment, int(length)) for length in lengths],
        **{
            tier: [fetch_seconds(links[link], token_bytes, int(length)) for length in lengths]
            for tier, link in PLANNED.items()
        },
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="", help="a preset; default: a small model on a CPU")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    arguments.add_argument("--gib", type=float, default=1.0, help="of host memory, for each of three engines")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    rows: list[dict[str, float]] = []
    found: dict[str, Any] = {"model": given.model or CPU_MODEL, "repeats": given.repeats, "rows": rows}
    found["checksum_bytes_per_s"] = checksum_rate()
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(given.model, Path(folder), max(given.lengths) + 64, given.gib)
        host = tiers_of(engines.source).host
        found["block_bytes"] = host.block_bytes
        chance, vocab = torch.Generator().manual_seed(0), engines.source.runner.valid_vocab
        for length in given.lengths:
            written = length // BLOCK < host.num_slots // WRITE_SHARE
            turns = []
            for _ in range(given.repeats):
                turns.append(engines.turns(torch.randint(vocab, (length,), generator=chance).tolist(), written))
            times = {name: statistics.median(each[name] for each in turns) for name in turns[0]}
            rows.append({"tokens": length, **times})
            shown = "  ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())
            print(f"{length} tokens: {shown}", flush=True)
            save(given.model, found)
        engines.close()
    found["fits"] = fits(rows)
    save(given.model, found)


def save(model: str, found: dict[str, Any]) -> None:
    """Of a preset on a GPU; a small model on a CPU is a trial."""
    if model:
        lengths = [row["tokens"] for row in found["rows"]]
        write_result("kv_tiers", {**found, "planned": planned(model, lengths)})


def fits(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """A line through all lengths but the last, and what it says of the last."""
    shown = {}
    for name in rows[0]:
        points = [(row["tokens"], row[name]) for row in rows if name in row]
        if name == "tokens" or len(points) < 3:
            continue
        latency, a_token = fitted_line(points[:-1])
        predicted = latency + a_token * points[-1][0]
        shown[name] = {"latency_s": latency, "seconds_a_token": a_token, "last_predicted_s": predicted}
        print(f"{name}: {1e3 * latency:.2f} ms + {1e6 * a_token:.2f} µs a token; "
              f"at {points[-1][0]} tokens {1e3 * predicted:.1f} ms, measured {1e3 * points[-1][1]:.1f} ms")  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
