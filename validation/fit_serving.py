"""Fit what serving engines reach of a datasheet to measured steps, and say how far off that is.

    python validation/fit_serving.py --data DIR            errors with the constants that are committed
    python validation/fit_serving.py --data DIR --write    fit them anew into src/lmworks/plan/serving/serving.toml

DIR holds aiconfigurator_silicon_inference_refs.csv (ai-dynamo/aiconfigurator, tools/accuracy_tracking): mean time to
the first token and between tokens of served models. With them go steps of vLLM on one H200 and of gpt-fast on one A100,
below. Every constant is drawn towards a prior, as 40 rows cannot carry a dozen constants; errors are also
given with each model left out of the fit. The limits of the host are not fitted to them: they are read from runs of our
own engine and API (benchmarks/results/engine_gpu.json, serve_overhead_gpu_0.6b.json, serve_requests_cpu_*.json, which
`benchmarks/serve_overhead.py --prompt 128 --batch 32 --rounds 2 --tokens 8` and `--tokens 64` wrote).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.plan.serving.batching import Lengths, queueing_seconds, steady
from lmworks.plan.serving.host import HostLimits
from lmworks.plan.serving.inference import CONSTANTS, Deployment, Rates
from lmworks.plan.serving.served_model import Experts, Linear, ServedModel
from lmworks.spec import ModelSpec, catalogue
from lmworks_validation.components import SYSTEMS

TABLE = "aiconfigurator_silicon_inference_refs.csv"
FORMATS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "": "bf16"}


# --- models, from their published configurations ---------------------------------------------------------


def mlp(hidden: int, width: int, layers: int) -> list[Linear]:
    """SwiGLU: gate and up are one product."""
    return [Linear(hidden, 2 * width, layers), Linear(width, hidden, layers, split="rows")]


def latent(name: str, *, heads: int, experts: int, dense: int, vocab: int) -> ServedModel:
    """DeepSeek V3 and its kin: a latent vector of 512 + 64 numbers is all that a token leaves in the cache."""
    layers, hidden, q_rank, kv_rank, rope, head, ffn = 61, 7168, 1536, 512, 64, 128, 2048
    linears = (
        Linear(hidden, q_rank + kv_rank + rope, layers, split="whole"),
        Linear(q_rank, heads * (head + rope), layers),
        Linear(kv_rank, heads * 2 * head, layers),
        Linear(heads * head, hidden, layers, split="rows"),
        *mlp(hidden, ffn, layers - dense),  # the shared expert
        *mlp(hidden, 18_432, dense),
    )
    return ServedModel(
        name, layers, hidden, linears, Linear(hidden, vocab), tables=vocab * hidden, small=layers * hidden * experts,
        experts=Experts(experts, 8, layers - dense, 3 * hidden * ffn), kv_layers=layers, kv_heads=1,
        kv_width=kv_rank + rope, kv_vectors=1, window=0, prefill_flops=2.0 * layers * heads * (2 * head + rope),
        decode_flops=2.0 * layers * heads * (2 * kv_rank + rope),
    )  # fmt: skip


def hybrid() -> ServedModel:
    """Qwen3.5-397B-A17B: every fourth layer attends; the others keep a state, read like 2 × 64 × 128² numbers."""
    layers, hidden, full, vocab = 60, 4096, 15, 248_320
    linears = (
        Linear(hidden, 2 * 32 * 256 + 2 * 2 * 256, full),  # queries and their gate, keys, values
        Linear(32 * 256, hidden, full, split="rows"),
        Linear(hidden, 2 * 16 * 128 + 2 * 64 * 128, layers - full),
        Linear(64 * 128, hidden, layers - full, split="rows"),
        *mlp(hidden, 1024, layers),
    )
    return ServedModel(
        "qwen3.5-397b", layers, hidden, linears, Linear(hidden, vocab), tables=vocab * hidden,
        small=layers * hidden * 512, experts=Experts(512, 10, layers, 3 * hidden * 1024), kv_layers=full, kv_heads=2,
        kv_width=256, kv_vectors=2, window=0, prefill_flops=4.0 * full * 32 * 256, decode_flops=4.0 * full * 32 * 256,
    )  # fmt: skip


def moe(name: str, **shape: int) -> ServedModel:
    return ServedModel.of(ModelSpec(head_dim=128, context=40_960, **shape), name)


DEEPSEEK = latent("deepseek-v3", heads=128, experts=256, dense=3, vocab=129_280)
MODELS = {
    "deepseek-ai/DeepSeek-R1": DEEPSEEK,
    "deepseek-ai/DeepSeek-V3": DEEPSEEK,
    "moonshotai/Kimi-K2.5": latent("kimi-k2.5", heads=64, experts=384, dense=1, vocab=163_840),
    "Qwen/Qwen3.5-397B-A17B": hybrid(),
    "MiniMaxAI/MiniMax-M2.5": moe(
        "minimax-m2.5", layers=62, hidden=3072, heads=48, kv_heads=8, vocab=200_064, experts=256, top_k=8,
        expert_ffn=1536,
    ),
    "Qwen/Qwen3-235B-A22B-FP8": moe(
        "qwen3-235b-a22b", layers=94, hidden=4096, heads=64, kv_heads=4, vocab=151_936, experts=128, top_k=8,
        expert_ffn=1536,
    ),
    "Qwen/Qwen3-32B": ServedModel.of(ModelSpec.from_preset("qwen3-32b")),
}  # fmt: skip


# --- rows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measurement, and what was running."""

    name: str
    model: str
    engine: str
    deployment: Deployment
    lengths: Lengths
    batch: int
    concurrency: int  # 0: not said, so neither is how long requests queued
    mixed: bool  # prompts share the steps of decoding; otherwise other machines take them
    tpot: float
    ttft: float = 0.0

    def predict(self, rates: Rates) -> tuple[float, float]:
        """TPOT and TTFT in seconds.

        These benchmarks keep `concurrency` requests in flight, ten rounds of them: a tenth of all requests arrive at
        once and wait for each other's prompts.
        """
        deployment = dataclasses.replace(self.deployment, rates=rates)
        point = steady(deployment, self.lengths, self.batch)
        if not self.mixed:
            return float(point.decode), 0.0
        burst = 0.1 * (self.concurrency - 1) / 2 * point.added
        wait = queueing_seconds(float(point.prefill_share), float(point.added))
        ttft = 1e-3 * rates.request_ms + point.decode / 2 + point.prefill + burst + wait
        return float(point.tpot), float(ttft)


def read_rows(path: Path) -> list[Row]:
    rows, seen = [], set[tuple[str, str]]()
    with path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            key = (record["silicon_ttft_ms"], record["silicon_tpot_ms"])
            if key not in seen:  # one run is listed twice, under two names
                rows.append(read_row(record))
                seen.add(key)
    return rows


def read_row(record: dict[str, str]) -> Row:
    mixed = record["mode"] == "agg"
    side = "" if mixed else "decode_"

    def number(key: str, default: int = 1) -> int:
        return int(float(record[side + key] or default)) or default

    served = MODELS[record["model_path"]]
    weights = FORMATS[record["gemm_quant_mode"]]
    latent_kv = served.kv_vectors == 1
    tp = number("tp_size")
    deployment = Deployment(
        served,
        catalogue()[SYSTEMS[record["system"]]],
        Rates.of(record["backend"]),
        tp=tp,
        ep=number("moe_ep_size"),
        attention_dp=number("attention_dp_size"),
        weights=weights,
        kv="fp8" if record["backend"] == "trtllm" and weights != "bf16" and not latent_kv else "bf16",
    )
    said = dict(part.split("=", 1) for part in record["silicon_data_source"].split("; ") if "=" in part)
    return Row(
        record["id"], served.name, record["backend"], deployment,
        Lengths(int(record["isl"]), int(record["osl"])), number("batch_size"),
        int(said.get("silicon_concurrency", 0)), mixed,
        float(record["silicon_tpot_ms"]) / 1e3, float(record["silicon_ttft_ms"]) / 1e3,
    )  # fmt: skip


def anchors() -> list[Row]:
    """Steps of engines on one card that are not in the table.

    vLLM 0.22.1 on an H200, bf16, random weights, batch 1, 8 and 64: prompts and answers of 100–1024 tokens, so a
    running sequence is about 840 tokens long. gpt-fast on an A100, Llama 2 7B at batch 1 (its README): captured as one
    graph, as vLLM is, so it is taken for the same engine.
    """
    steps = {"qwen3-0.6b": (1.94, 1.93, 3.70), "llama3-8b": (5.09, 5.77, 9.56)}
    rows = [
        anchor(
            name, ServedModel.of(ModelSpec.from_preset(name)), "H200-SXM-141GB", "bf16", Lengths(562, 562), batch, ms
        )
        for name, times in steps.items()
        for batch, ms in zip((1, 8, 64), times, strict=True)
    ]
    llama2 = ServedModel.of(ModelSpec(layers=32, hidden=4096, heads=32, ffn=11_008, vocab=32_000))
    for weights, speed in {"bf16": 104.9, "int8": 155.6, "int4": 196.8}.items():
        rows.append(anchor("llama2-7b", llama2, "A100-SXM-80GB", weights, Lengths(8, 200), 1, 1e3 / speed))
    return rows


def anchor(name: str, served: ServedModel, gpu: str, weights: str, lengths: Lengths, batch: int, ms: float) -> Row:
    deployment = Deployment(served, catalogue()[gpu], Rates.of("vllm"), weights=weights)
    label = f"{name}_{gpu}_{weights}_batch{batch}"
    return Row(label, name, "vllm", deployment, lengths, batch, batch, mixed=False, tpot=ms / 1e3)


def drained(values: np.ndarray) -> list[str]:
    """Not fitted: 256 requests at once, 100–1024 tokens in and out, until the last is done. vLLM 0.22.1 on an H200."""
    random = np.random.default_rng(0)
    prompts, answers = random.integers(100, 1025, 256), random.integers(100, 1025, 256)
    found = []
    for name, measured in {"qwen3-0.6b": 23_879, "llama3-8b": 9823}.items():
        served, gpu = ServedModel.of(ModelSpec.from_preset(name)), catalogue()["H200-SXM-141GB"]
        deployment = Deployment(served, gpu, rates_of(values, "vllm"))
        steps = -(-prompts.sum() // deployment.chunk)
        seconds = steps * deployment.step(prefill=prompts.sum() / steps, prompts=256 / steps)
        for step in range(1, answers.max()):
            running = answers > step
            seconds += deployment.step(running.sum(), prompts[running].mean() + step)
        ratio = answers.sum() / seconds / measured
        found.append(f"256 requests of {name} on an H200, not fitted: {measured:,} tokens/s, × {ratio:.2f}")
    return found


# --- the host's limits -----------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def host_limits() -> HostLimits:
    """Of one H200's host.

    Engine: of runs of 256 requests the least host time a sequence and step; the rest of it overlaps with waiting. API:
    what its process computed for a token, of which a part is the request's. How many tokens a request is worth is known
    from a CPU, with 8 and with 64 tokens a request: token + request / tokens.
    """
    runs = [run for model in read_result("engine_gpu.json")["models"].values() for run in offline_runs(model)]
    sequence = min(run["host_share"] * run["seconds"] / run["steps"] / run["mean_batch"] for run in runs)
    short = [read_result(f"serve_requests_cpu_{tokens}.json") for tokens in (8, 64)]
    columns = np.array([[1.0, 1 / run["tokens"]] for run in short])
    token, request = np.linalg.solve(columns, [run["api_cpu_us_per_token"] for run in short])
    served, worth = read_result("serve_overhead_gpu_0.6b.json"), float(request / token)
    each = served["api_cpu_us_per_token"] / (1 + worth / served["tokens"])
    return HostLimits(1e6 * sequence, each, worth * each)


def read_result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def offline_runs(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for kind in ("throughput", "quant") for run in model.get(kind, {}).values() if "host_share" in run]


# --- the fit ---------------------------------------------------------------------------------------------

ENGINES = ("vllm", "sglang", "trtllm")
# Constant → what it would be without any table, and how far a table may pull it (standard deviation of its logarithm).
PRIORS = {
    "weight_bandwidth": (0.85, 0.1),
    "dequantise": (0.85, 0.15),
    "expert_bandwidth": (0.7, 0.25),
    "kv_bandwidth": (0.7, 0.2),
    "compute": (0.65, 0.15),
    "attention_compute": (0.4, 0.25),
    "layer_us": (30.0, 0.4),
    "moe_layer_us": (40.0, 0.4),
    "exchange_us": (8.0, 0.3),
    **{f"{engine}.step_us": (600.0, 0.4) for engine in ENGINES},
    **{f"{engine}.request_ms": (40.0, 0.7) for engine in ENGINES},
}
NAMES = list(PRIORS)
NOISE_TPOT, NOISE_TTFT = 0.15, 0.5  # a row's own scatter (of its logarithm): these tables mix versions and protocols


def rates_of(values: np.ndarray, engine: str) -> Rates:
    named = dict(zip(NAMES, np.exp(values), strict=True))
    common = {name: value for name, value in named.items() if "." not in name}
    return Rates(**common, step_us=named[f"{engine}.step_us"], request_ms=named[f"{engine}.request_ms"])


def errors(values: np.ndarray, rows: list[Row]) -> np.ndarray:
    """log(predicted / measured) over its noise: TPOT of every row, TTFT where prompts share the engine."""
    found = []
    for row in rows:
        tpot, ttft = row.predict(rates_of(values, row.engine))
        found.append(np.log(tpot / row.tpot) / NOISE_TPOT)
        if row.mixed:
            found.append(np.log(ttft / row.ttft) / NOISE_TTFT)
    return np.array(found)


def fit(rows: list[Row], rounds: int = 25) -> np.ndarray:
    """Gauss-Newton on logarithms; a row far off counts less (Huber), a constant is drawn to its prior."""
    prior = np.log([value for value, _ in PRIORS.values()])
    loose = np.array([width for _, width in PRIORS.values()])
    values = prior.copy()
    for _ in range(rounds):
        base = errors(values, rows)
        slope = np.stack([(errors(values + 1e-4 * unit, rows) - base) / 1e-4 for unit in np.eye(len(values))], axis=1)
        root = np.sqrt(np.minimum(1.0, 1.5 / np.maximum(np.abs(base), 1e-9)))
        matrix = np.vstack([slope * root[:, None], np.diag(1 / loose)])
        target = np.concatenate([-base * root, (prior - values) / loose])
        values = values + 0.7 * np.linalg.lstsq(matrix, target, rcond=None)[0]
    return values


def committed() -> np.ndarray:
    found = {engine: dataclasses.asdict(Rates.of(engine)) for engine in ENGINES}
    return np.log(
        [found[name.split(".")[0]][name.split(".")[1]] if "." in name else found["vllm"][name] for name in NAMES]
    )


# --- what comes out --------------------------------------------------------------------------------------


def score(ratios: list[float]) -> str:
    off = np.abs(np.array(ratios) - 1)
    bias = np.exp(np.mean(np.log(ratios))) - 1
    return (
        f"{len(off)} rows, mean {off.mean():.1%}, median {np.median(off):.1%}, worst {off.max():.0%}, bias {bias:+.1%}"
    )


def ratios(values: np.ndarray, rows: list[Row]) -> list[tuple[float, float]]:
    found = []
    for row in rows:
        tpot, ttft = row.predict(rates_of(values, row.engine))
        found.append((tpot / row.tpot, ttft / row.ttft if row.mixed else 0.0))
    return found


def write(values: np.ndarray, gpus: set[str], left: list[tuple[float, float]], notes: list[str]) -> None:
    """`left`: ratios of TPOT and TTFT (0: none) with a row's model left out, for the errors that plans quote."""
    named = dict(zip(NAMES, np.exp(values), strict=True))
    lines = ["# What serving engines reach of a datasheet. Written by validation/fit_serving.py."]
    lines += [
        "# Source: ai-dynamo/aiconfigurator@095f58a51c, tools/accuracy_tracking/silicon_refs.csv, rows that name their",
        "# concurrency; vLLM 0.22.1 on one H200 (six steps); gpt-fast on one A100 (its README). Predicted / measured:",
        *(f"#   {note}" for note in notes), "", f"fitted_on = {sorted(gpus)}".replace("'", '"'), "", "[common]",
    ]  # fmt: skip
    lines += [f"{name} = {value:.3g}" for name, value in named.items() if "." not in name]
    for engine in ENGINES:
        lines += ["", f"[engine.{engine}]"]
        lines += [
            f"{name.split('.')[1]} = {value:.3g}" for name, value in named.items() if name.startswith(engine + ".")
        ]
    lines += ["", "[host]  # not fitted: of our own engine and API"]
    lines += [f"{name} = {value:.3g}" for name, value in dataclasses.asdict(host_limits()).items()]
    lines += ["", "[errors]  # median, with each model left out of the fit"]
    for key, found in zip(("tpot", "ttft"), zip(*left, strict=True), strict=True):
        lines.append(f"{key} = {np.median([abs(ratio - 1) for ratio in found if ratio]):.2g}")
    CONSTANTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    parser.add_argument("--write", action="store_true", help="fit anew and write the constants")
    options = parser.parse_args()
    every = anchors() + read_rows(options.data / TABLE)
    rows, unsaid = [row for row in every if row.concurrency], [row for row in every if not row.concurrency]
    values = fit(rows) if options.write else committed()
    left: dict[str, tuple[float, float]] = {}
    for model in sorted({row.model for row in rows}):
        held = [row for row in rows if row.model == model]
        without = fit([row for row in rows if row.model != model])
        left |= {row.name: found for row, found in zip(held, ratios(without, held), strict=True)}
    print(f"{'row':100} {'ms':>7} {'fitted':>7} {'blind':>7}   {'TTFT ms':>8} {'fitted':>7} {'blind':>7}")
    for row, (tpot, ttft) in zip(rows, ratios(values, rows), strict=True):
        first = f"{1e3 * row.ttft:8.0f} {ttft:7.2f} {left[row.name][1]:7.2f}" if row.mixed else ""
        print(f"{row.name[:100]:100} {1e3 * row.tpot:7.2f} {tpot:7.2f} {left[row.name][0]:7.2f}   {first}")
    for row, (tpot, _) in zip(unsaid, ratios(values, unsaid), strict=True):
        print(f"{row.name[:100]:100} {1e3 * row.tpot:7.2f} {tpot:7.2f}     not fitted: concurrency unknown")
    fitted = ratios(values, rows)
    mixed = [(found, left[row.name]) for row, found in zip(rows, fitted, strict=True) if row.mixed]
    notes = [
        f"TPOT fitted: {score([tpot for tpot, _ in fitted])}",
        f"TPOT, each model left out: {score([tpot for tpot, _ in left.values()])}",
        f"TTFT fitted: {score([found[1] for found, _ in mixed])}",
        f"TTFT, each model left out: {score([found[1] for _, found in mixed])}",
    ]
    notes += drained(values)
    print("\n".join(notes))
    for name, value in zip(NAMES, np.exp(values), strict=True):
        print(f"  {name:20} {value:8.3g}   prior {PRIORS[name][0]:g}")
    if options.write:
        write(values, {row.deployment.gpu.name for row in rows}, list(left.values()), notes)


if __name__ == "__main__":
    main()
