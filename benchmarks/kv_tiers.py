"""What a prefix hit in each tier of the KV cache takes, against computing the prompt again.

Of prompts of several lengths, the time to the first token: computed; with its blocks in the device's cache, in host
memory, on disk, in a shared folder, at a server of blocks over TCP (loopback), at a prefill engine. Measurements take
turns, so a busy machine slows all of them. Beside them what the planner's formula says of the lengths that it was not
fitted to. Reads of a disk come from the page cache.

    python benchmarks/kv_tiers.py                                    # a small model on a CPU, two minutes
    python benchmarks/kv_tiers.py --model llama3-8b --lengths 1024 4096 16384 65536 --gib 40   # an H200; not run yet
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import write_result

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.kv_tiers.disk import DiskStore
from lmworks.engine.kv_tiers.open import GIB, open_tiers
from lmworks.engine.kv_tiers.socket_store import BlockServer
from lmworks.engine.kv_tiers.tiers import KVTiers
from lmworks.loading import load_engine
from lmworks.plan.serving.kv_tiers import fitted_line
from lmworks.spec import EngineSpec, ModelSpec

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
CPU_MODEL = {"layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 1024, "context": 4096}


def small_engine(spec: EngineSpec) -> Engine:
    from lmworks.engine.core.model_runner import ModelRunner
    from lmworks.model import GPT

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
    forget_device(engine)
    tiers_of(engine).host.clear()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="", help="a preset or a folder; default: a small model on a CPU")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    arguments.add_argument("--gib", type=float, default=1.0, help="of host memory")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        disk = DiskStore(root / "server", int(given.gib * GIB))
        server = BlockServer("tcp://127.0.0.1:0", disk)
        server.start()

        def make(**options: object) -> Engine:
            common = {"kv_host_gib": given.gib, "max_seqs": 4, "context": max(given.lengths) + 64, **options}
            if given.model:
                return load_engine(given.model, EngineSpec.from_dict(common), None, 0)[1]
            return small_engine(EngineSpec.from_dict({**common, "device": "cpu", "dtype": "fp32", "blocks": 1024}))

        prefill = make(kv_listen="tcp://127.0.0.1:0")
        listener = tiers_of(prefill).listener
        assert listener is not None
        engines = {
            "host": make(),
            "disk": make(kv_disk=str(root / "disk"), kv_disk_gib=given.gib),
            "shared folder": make(kv_shared=str(root / "shared")),
            "kv-store": make(kv_shared=server.address),
            "prefill engine": make(kv_peers=[listener.address]),
        }
        block_bytes = tiers_of(prefill).host.block_bytes
        chance = torch.Generator().manual_seed(0)
        vocab = prefill.runner.valid_vocab
        rows = []
        for length in given.lengths:
            times: dict[str, list[float]] = {name: [] for name in ("computed", "device", *engines)}
            for _ in range(given.repeats):
                prompt = torch.randint(vocab, (length,), generator=chance).tolist()
                first_token(prefill, prompt)
                for name, engine in engines.items():
                    first_token(engine, prompt)
                    tiers_of(engine).flush(60)
                    forget_device(engine) if name == "host" else forget_host(engine)
                forget_device(engines["host"])
                tiers_of(engines["host"]).host.clear()
                times["computed"].append(first_token(engines["host"], prompt)[0])
                times["device"].append(first_token(engines["host"], prompt)[0])
                forget_device(engines["host"])
                for name, engine in engines.items():
                    remote = listener.address if name == "prefill engine" else None
                    seconds, found = first_token(engine, prompt, remote)
                    assert found >= length - 16, (name, found)
                    times[name].append(seconds)
                    forget_host(engine)
            rows.append({"tokens": length, **{name: statistics.median(values) for name, values in times.items()}})
            shown = "  ".join(f"{name} {1e3 * rows[-1][name]:.1f} ms" for name in times)
            print(f"{length} tokens: {shown}", flush=True)
        for engine in (prefill, *engines.values()):
            engine.close()
        server.shutdown()
    fits = {}
    for name in ("computed", *engines):
        points = [(row["tokens"], row[name]) for row in rows[:-1]]
        latency, a_token = fitted_line(points)
        predicted = latency + a_token * rows[-1]["tokens"]
        fits[name] = {"latency_s": latency, "seconds_a_token": a_token, "last_predicted_s": predicted}
        print(
            f"{name}: {1e3 * latency:.2f} ms + {1e6 * a_token:.2f} µs a token; the last length {1e3 * predicted:.1f} ms"
        )
    write_result(
        "kv_tiers", {"model": given.model or CPU_MODEL, "block_bytes": block_bytes, "rows": rows, "fits": fits}
    )


if __name__ == "__main__":
    main()
