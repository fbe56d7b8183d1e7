"""What the API costs: the same requests given to an engine by a call, and over HTTP as streams; turn about, in one run.

python benchmarks/serve_overhead.py                        # a byte-level model, 16 requests at once
python benchmarks/serve_overhead.py --model llama3-8b --tokens 256 engine.blocks=4096

Both have an engine of their own with the same settings on the same device, and only one works at a time. Two figures
depend less on who else is busy on this machine: what the API's process computed for a token, and how much longer a
token took for the client than between two steps of the engine behind the API. The latter leaves out whatever the API
does to the speed of that engine: it is no substitute for the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import write_result

from lmworks import LLM, SamplingParams
from lmworks.bench.serve import Slo, bench_serve
from lmworks.bench.workload import Arrivals, Lengths, Load
from lmworks.cli.generate import engine_options

PATIENCE_S = 300.0  # for a server to come up


@dataclass(frozen=True)
class Up:
    """A server that runs."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Of the API's own process, so far; its engine is another."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def inter_token_totals(self) -> tuple[float, float]:
        """The engine's own count: seconds between tokens in all, and how many there were."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = "lmworks:inter_token_latency_seconds"
        total, count = (
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}_{what}{{"))
            for what in ("sum", "count")
        )
        return total, count


@contextmanager
def byte_model() -> Iterator[str]:
    """A run folder: the tiny model after one step. A preset has no tokenizer, so its answers would have no text."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(__file__).parent.parent / "configs" / "tiny.toml"
        words = ["train", str(spec), "model.context=1024", "optim.steps=1", "--run-dir", f"{folder}/tiny"]
        subprocess.run([sys.executable, "-m", "lmworks", *words], check=True, capture_output=True)
        yield f"{folder}/tiny"


@contextmanager
def served(model: str, *words: str, program: Path | None = None) -> Iterator[Up]:
    """`lmworks serve`, or a program in its place, on a free port. What it logs goes to a file, shown where it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(f"/tmp/lmworks-serve-{port}.log")
    start = ["-m", "lmworks"] if program is None else [str(program)]
    command = [sys.executable, *start, "serve", model, "--port", str(port), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            await_ready(url, process, log)
            yield Up(url, process.pid)
        finally:
            process.terminate()
            process.wait(60)
    log.unlink()


def await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server did not come up:\n{log.read_text()[-2000:]}")


def called(llm: LLM, load: Load) -> float:
    """Tokens a second of the engine, called directly."""
    bodies = [json.loads(shot.body) for shot in load.draw("completions", "")]
    params = [
        SamplingParams(
            temperature=body["temperature"], seed=body["seed"], max_tokens=body["max_tokens"], ignore_eos=True
        )
        for body in bodies
    ]
    began = time.perf_counter()
    results = llm.generate([body["prompt"] for body in bodies], params, progress=False)
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)


@dataclass(frozen=True)
class Asked:
    """One round over HTTP."""

    rate: float  # tokens a second
    cpu: float  # seconds that the API computed for a token
    behind: float  # how much longer a token took than between two steps of the engine: a part of the latter


def asked(server: Up, load: Load) -> Asked:
    cpu, (seconds, count) = server.cpu_seconds(), server.inter_token_totals()
    measured = bench_serve(server.url, load, Slo())
    found, (seconds_after, count_after) = measured.to_dict(), server.inter_token_totals()
    if found["completed"] < load.requests:
        raise SystemExit(f"not all requests were answered: {found['rejected']} {found['errors']}")
    own = (seconds_after - seconds) / (count_after - count)
    cpu = (server.cpu_seconds() - cpu) / found["output_tokens"]
    return Asked(found["output_tokens_per_s"], cpu, load.requests / found["output_tokens_per_s"] / own - 1)


def measure(model: str, batch: int, prompt: int, tokens: int, rounds: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Turn about. Each round has other prompts, the same ones for both, so that no cache helps either."""
    words = [*overrides, f"engine.max_seqs={batch}"]
    direct, api = list[float](), list[Asked]()
    with LLM(model, **engine_options(words)) as llm, served(model, *words) as server:
        for number in range(rounds + 1):
            load = Load(batch, Arrivals(), Lengths((prompt, prompt), (tokens, tokens)), seed=number)
            turns = [
                lambda load=load: direct.append(called(llm, load)),
                lambda load=load: api.append(asked(server, load)),
            ]
            for turn in turns if number % 2 else reversed(turns):  # who goes first changes: a drift favours neither
                turn()
    direct, api = direct[1:], api[1:]  # the first warms up
    rates = [one.rate for one in api]
    ratios = [one / other - 1 for one, other in zip(direct, rates, strict=True)]
    return {
        "model": Path(model).name,
        "batch": batch,
        "prompt": prompt,
        "tokens": tokens,
        "direct_tokens_per_s": direct,
        "api_tokens_per_s": rates,
        "direct_us_per_token": 1e6 / statistics.median(direct),
        "api_us_per_token": 1e6 / statistics.median(rates),
        "api_cpu_us_per_token": 1e6 * statistics.median(one.cpu for one in api),
        "behind_the_engine": statistics.median(one.behind for one in api),
        "overhead": statistics.median(ratios),
        "overhead_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def show(found: dict[str, Any]) -> None:
    low, high = found["overhead_quartiles"]
    print(
        f"{found['model']}, batch {found['batch']}, {found['prompt']} tokens in and {found['tokens']} out: "
        f"called {found['direct_us_per_token']:.1f} µs a token, over HTTP {found['api_us_per_token']:.1f} µs, "
        f"{found['overhead']:+.1%} (quartiles {low:+.1%} and {high:+.1%}); "
        f"{found['behind_the_engine']:+.1%} behind its own engine's steps; "
        f"the API computed {found['api_cpu_us_per_token']:.1f} µs for each"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a preset, or a folder")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--save", help="name of the file in results/")
    parser.add_argument("overrides", nargs="*", metavar="engine.KEY=VALUE")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with byte_model() if given.model is None else nullcontext(given.model) as name:
        result = measure(name, given.batch, given.prompt, given.tokens, given.rounds, given.overrides)
    show(result)
    if given.save:
        print(write_result(given.save, result))
