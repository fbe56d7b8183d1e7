"""What prints each table of the command line: the command itself, or what it prints with, given figures of a real one.

Runs and plans are asked for as they are typed. What takes minutes to measure is printed from results that are kept
in benchmarks/results, or from a few figures of the same kind.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import RunSpec

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
POINTS = Path(__file__).parents[1] / "validation" / "scaling" / "chinchilla_points.csv"
CONFIGS = Path(__file__).parents[1] / "configs"
TRACES = Path(__file__).parent / "trace" / "data"
GPU = "cluster.gpu=H100-SXM-80GB"
LAYOUT = (
    "model.layers=8",
    "parallel.dp=2",
    "parallel.tp=2",
    "parallel.pp=2",
    "data.micro_batch=1",
    "data.global_batch=8",
)


@dataclass(frozen=True)
class Sample:
    folder: Path
    patch: pytest.MonkeyPatch
    lmworks: Callable[..., tuple[int, str, str]]

    def prints(self, *words: str) -> str:
        code, out, error = self.lmworks(*words)
        assert code == 0, error
        return out


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(name: str) -> tuple[list[str], list[list[str]]]:
    """The first table of a report that is kept."""
    lines = [line for line in (RESULTS / name).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[0], [row for row in rows[2:10] if len(row) == len(rows[0])]


def planned_fleet(sample: Sample) -> None:
    sample.prints("fleet", "plan", str(CONFIGS / "fleet.toml"))


def fleet_status(sample: Sample) -> None:
    from lmworks.cli.fleet import print_status

    one = {"name": "chat-0", "url": "http://127.0.0.1:8081", "ready": True, "pid": 4711, "restarts": 0}
    print_status([one, {**one, "name": "gateway", "url": "http://127.0.0.1:8080", "ready": False, "pid": None}])


def lacking_fleet(sample: Sample) -> None:
    from lmworks.cli.fleet import print_lacking
    from lmworks.fleet.check import Finding

    print_lacking([Finding("disruption", "Deployment/serve-code-editor", "a PodDisruptionBudget")], 32)


def fitted_steps(sample: Sample) -> None:
    from lmworks.cli.fleet import print_fitted

    found = result("fleet_validation.json")["fit"]
    print_fitted(found)


def tenants_of_a_gateway(sample: Sample) -> None:
    file = sample.folder / "gateway.toml"
    file.write_text(f"[tenants]\nstore = 'sqlite:///{sample.folder}/gateway.db'\n", encoding="utf-8")
    config = ("--config", str(file))
    sample.prints("gateway", "tenants", "create", "acme", "--limit", "dollars_per_month=50", *config)
    sample.prints("gateway", "keys", "create", "acme", "--name", "ci", "--expires", "90d", *config)
    for words in (("keys", "list"), ("tenants", "list"), ("usage",), ("audit",)):
        sample.prints("gateway", *words, *config)


def drilled(sample: Sample) -> None:
    from lmworks.cli.drill import print_summary
    from lmworks.drill.incident import Check, Report

    seen = {"requests": 40, "within_slo": 0.975, "ends": {"right": 39, "refused": 1}}
    checks = [
        Check("alert ServerDown", True, "within 30 s", "12 s after the fault"),
        Check("the incident ends", True, "within 60 s", "after 14 s"),
    ]
    print_summary([Report("server-killed", "a server is killed", checks, [], [], {"acme": {"during": seen}}, 80.0, {})])


def served_demo(sample: Sample) -> None:
    from lmworks.cli.fleet import print_demo

    seen = {"requests": 40, "within_slo": 1.0, "ttft_p50": 0.041, "ttft_p99": 0.3, "ends": {"right": 40}}
    print_demo(
        {
            "phases": [{"phase": "a server is killed", "tenant": "acme", **seen}],
            "objective": 0.9,
            "ttft_slo": 1.0,
            "rollout": {"state": "rolled_back", "reason": "60.0% of its tries failed, 0.0% of the stable pool's"},
            "tokens_read": {"acme": 1920},
            "tokens_billed": {"acme": 1920},
            "alerts": ["ServerDown"],
        },
        [],
    )


def interrupted_run(folder: Path, name: str = "small") -> RunFolder:
    """Saved, hit by a spike, killed, and taken up again."""
    table = {"name": name, "model": {"preset": "tiny"}, "optim": {"steps": 6, "warmup": 0}, "checkpoint": {"every": 2}}
    run = RunFolder.create(folder / "runs" / name, RunSpec.from_dict(table))
    zero = datetime(2026, 11, 15, 12, tzinfo=UTC)

    def write(file: Path, at: float, **fields: object) -> None:
        time = (zero + timedelta(seconds=at)).isoformat(timespec="milliseconds")
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": time, **fields}) + "\n")

    figures = {"step_s": 1.0, "checkpoint_s": 0.0, "tokens": 100, "tokens_per_s": 100.0, "loss": 2.0}
    write(run.events_path, 0, kind="start", step=0, attempt=0)
    for step in (1, 2, 3, 4):
        write(run.metrics_path, step, step=step, attempt=0, **figures)
    write(run.events_path, 2.5, kind="save", step=2, seconds=0.5, path="step-000002")
    spike = {"reason": "spike_loss", "what": "loss 9.25 is high", "zscore": 12.34567, "cursor": 3, "action": "log"}
    write(run.events_path, 3.75, kind="spike", step=4, data={}, **spike)
    write(run.events_path, 13.5, kind="resume", step=2, attempt=1)
    for step in (3, 4, 5, 6):
        write(run.metrics_path, 12.5 + step, step=step, attempt=1, **figures)
    write(run.events_path, 18.5, kind="finish", step=6)
    with MetricsWriter(run.stats_path, 1) as lines:
        parts = ("embed", "blocks.0.attention.output", "head")
        keys = ("act_mean_abs", "act_rms", "act_max", "grad_norm", "param_norm", "update_ratio")
        lines.write(4, {"parts": {name: dict.fromkeys(keys, 0.0001234) for name in parts}})
    return run


def show(sample: Sample) -> str:
    run = interrupted_run(sample.folder)
    priced = {"step_s": 0.4, "tokens_per_s": 250.0, "run_s": 100_000.0, "dollars": 1234.5}
    again = {**priced, "attempt": 1, "step": 1_000_010, "ends": "2026-11-20T01:23:45+00:00", "evaluations_s": 1000.0}
    run.prediction_path.write_text(json.dumps({**priced, "interval": [0.3, 0.6], "after_steps": [again]}))
    return sample.prints("runs", "show", "small")


def calibrated(sample: Sample) -> None:
    from lmworks.cli.plan_from_runs import Calibration, print_calibration
    from lmworks.plan.calibration.factors import Factors
    from lmworks.plan.calibration.fit import Constant, Fit, FittedRun

    told = Constant("links", 1.2345, 1.1234, 1.3456, 0.123)
    kept = Constant("passes", 1.0, None, None, 0.2, "not told apart from the others: 20% of a step in the mean")
    run = FittedRun("measurements.csv row 14 llama3-70b 128×H100-SXM-80GB dp4 tp8 pp4", 54.6, 45.0, 55.2, 0.0512)
    fit = Fit(Factors(), (told, kept), (run,) * 7, 6)
    left = ["measurements.csv row 15 llama3-70b: no step time is measured"] * 6
    print_calibration(Calibration(None, fit, "profiles/lab.toml, which the runs name", left))  # type: ignore[arg-type]


def health(sample: Sample) -> None:
    sample.prints("health", str(interrupted_run(sample.folder).path), "--stats")


def listed(sample: Sample, *words: str) -> None:
    for name in ("first-attempt-at-a-higher-learning-rate", "second"):
        interrupted_run(sample.folder, name)
    sample.prints("runs", *words)


def compared(sample: Sample) -> None:
    names = ("a", "b")
    for name in names:
        interrupted_run(sample.folder, name)
    sample.prints("runs", "--compare", *(f"runs/{name}" for name in names))


def demo(sample: Sample) -> None:
    from lmworks.cli.demo import compare

    run = interrupted_run(sample.folder)
    said = {"step_s": 0.5, "interval": [0.325, 0.9], "tokens_per_s": 200.0, "memory_bytes": 2**20, "params": 139584}
    run.prediction_path.write_text(json.dumps({**said, "quiet": False, "noise": 1.5}))
    compare(run)


def diagnosed(sample: Sample) -> None:
    from lmworks.cli.diagnose import print_diagnosis
    from lmworks.diagnose.hang import Diagnosis

    host, place = "gpu-node-0123.cluster.example.org", "backward of step 17,345"
    one = {"host": host, "state": "stopped (SIGSTOP)", "place": place, "waits_in": "all_reduce #81,234 of group dp"}
    ranks = [SimpleNamespace(rank=rank, for_s=31.5 + rank, stacks="", **one) for rank in (0, 1023)]
    verdict = SimpleNamespace(text="rank 1023 did not come")
    found = Diagnosis("runs/tiny", 3, verdict, None, tuple(ranks))  # type: ignore[arg-type]
    print_diagnosis(found, False)


def saved(sample: Sample) -> RunFolder:
    run = interrupted_run(sample.folder)
    one = run.checkpoints / "step-000002"
    one.mkdir(parents=True)
    return run


def checkpoints(sample: Sample) -> None:
    saved(sample)
    sample.prints("checkpoint", "ls", "runs/small")


def contents(sample: Sample) -> None:
    from lmworks.cli.checkpoint import print_contents

    tensor = {"dtype": "float32", "shape": (128256, 16384), "pieces": 1024, "bytes": 8_405_385_216}
    held = SimpleNamespace(
        folder=sample.folder, step=12_000, bytes=2**40, time="2026-11-15T12:00:00", torch="2.13.0", ranks=1024,
        parallel={"tp": 8}, cursor=12_345, sections={"model": {"tensors": 1138, "bytes": 811_706_777_600}},
        files={"rank-0000.safetensors": {"rank": 0, "bytes": 792_681_423}},
        tensors=[SimpleNamespace(name="blocks.125.attention.output.weight exp_avg_sq", **tensor)],
    )  # fmt: skip
    print_contents(held, tensors=True)  # type: ignore[arg-type]


def data(sample: Sample, *words: str) -> None:
    from lmworks.data import prepare
    from tiny import write_documents

    folder = prepare([str(write_documents(sample.folder / "text.jsonl"))], sample.folder / "tokens", workers=1).folder
    if words == ("inspect",):
        sample.prints("data", "inspect", str(folder))
        return
    table = {"model": {"preset": "tiny"}, "data": {"path": str(folder), "seq": 16, "micro_batch": 1, "global_batch": 2}}
    RunFolder.create(sample.folder / "run", RunSpec.from_dict(table))
    sample.prints("data", "window", str(sample.folder / "run"), "--cursor", "1")


def predicted(sample: Sample) -> None:
    header = "model,gpus,gpu,seq,global_batch,dp,tp,pp\n"
    (sample.folder / "rows.csv").write_text(header + "llama3-8b,8,H100-SXM-80GB,8192,16,8,1,1\n")
    sample.prints("plan", "predict", "rows.csv")


def measured_links(sample: Sample) -> None:
    import numpy as np

    from lmworks.cli.plan_validate import print_links
    from lmworks.plan.devices.links import Curve

    times = {"all-reduce": {2: np.array([1.25e-5, 0.0123])}, "reduce-scatter": {16: np.array([1e-6, 123.0])}}
    print_links(Curve("here", 0.0, (), "host", np.array([1024, 2**30]), times))


def machine(sample: Sample) -> None:
    from lmworks.cli.plan_lookup import print_machine

    point = SimpleNamespace(shape=(16384, 4096, 14336), rate=9.87e14)
    rates = {"matmul.bf16": [point], "copy": [SimpleNamespace(shape=(2**30,), rate=4.2566e12)]}
    facts = {"launch_s": 5.25e-6, "launch_backward_s": 1.1e-5, "memory_bytes": 150_754_820_096, "quiet": False}
    facts["noise"] = 8.25
    print_machine(SimpleNamespace(name="NVIDIA H200", rates=rates, **facts))  # type: ignore[arg-type]


def bench_train(sample: Sample) -> None:
    from lmworks.cli import bench

    bench.print_step({"power": None, **next(row for row in result("train_gpu.json")["rows"] if "kernels" in row)})


def bench_offline(sample: Sample) -> None:
    from lmworks.cli import bench_inference

    facts = {
        "model": "qwen3-0.6b", "device": "NVIDIA H200", "dtype": "bf16", "output_tokens_per_s": 23456.7, "power": None,
        "requests": 256, "input_tokens": 65536, "output_tokens": 131072, "kv_use": {"peak": 0.987, "mean": 0.5,
        "bytes": 2**36}, "inter_token_ms": {"p50": 12.3, "p99": 45.6}, "floor_s": 3.21, "startup_s": 18.6,
        "prefill_s": 1.234, "prompt_tokens_per_s": 53123.4, "decode_s": 4.321, "host_share": 0.0123,
        "mean_batch": 123.4, "occupancy": 0.876, "first_times": {"kernels": ["a"], "graphs": 12}, "preemptions": 0,
        "steps": 1024, "decode_ms": {"1": 1.234, "256": 12.345}, "floors_ms": {"1": 1.0, "256": 10.5},
        "weights": "1.11 GiB", "bandwidth_gbs": 4256.6,
    }  # fmt: skip
    bench_inference.print_throughput(facts)


def bench_kernels(sample: Sample) -> None:
    from lmworks.cli import bench

    facts = result("kernels_train.json")
    bench.print_kernels({**facts, "rows": facts["rows"][::16]})


def bench_serve(sample: Sample) -> None:
    from lmworks.cli import bench_inference

    for facts in result("serve_cpu.json")["loads"]["a queue of 16"]:
        bench_inference.print_load_test({"url": "http://127.0.0.1:8000", **facts})


def profile(sample: Sample) -> None:
    from lmworks.cli.profile_engine import print_profile

    row = {"batch": 64, "ms": 213.94, "p99_ms": 339.968, "floor_ms": 0.307, "tokens_per_s": 2990.0, "gain": 49.1}
    facts = {
        "model": "qwen3-0.6b", "device": "NVIDIA H200", "bandwidth_gbs": 4256.6, "cache": {"gbs": 3210.5},
        "workload": {"prefill_s": 1.0, "decode_s": 4.0, "floor_s": 3.0, "output_tokens_per_s": 23456.0,
        "inter_token_ms": {"p50": 12.3, "p99": 45.6}}, "host": {"share": 0.1, "launch_ms": 0.123, "wait_ms": 1.234},
        "prefill": {"tokens_per_s": 53123.0}, "batching": [{**row, "slower": 1.3, "efficiency": 0.77}],
    }  # fmt: skip
    print_profile(facts)


def memory_snapshot(sample: Sample) -> None:
    from lmworks.cli.profile_memory import print_snapshot

    sizes = dict.fromkeys(("reserved", "allocated", "free", "largest_free", "peak"), 123_456_789_012)
    site = "training/cross_entropy.py:1234 backward_of_chunk"
    facts = {f"{name}_bytes": size for name, size in sizes.items()} | {"device": 0, "fragmentation": 0.5}
    facts["holders"] = [{"site": site, "bytes": 10**11, "blocks": 12345}]
    counts = {"peak_s": 12.3, "segment_allocs": 123, "segment_frees": 45, "out_of_memory": 1}
    print_snapshot("rank 0", [facts | counts])


def compared_recordings(sample: Sample) -> None:
    from lmworks.cli.profile_compare import print_comparison

    op = "aten::_scaled_dot_product_flash_attention_backward"
    rows = [{"name": op, "before_s": 12.3, "after_s": 4.5, "change_s": -7.8}]
    facts = {"step": {"before_s": 1.2, "after_s": 1.1}, "speedup": 1.09, "apart": False, "parts": rows, "ops": rows}
    ranges = {"before_range_s": (1.0, 1.3), "after_range_s": (1.0, 1.2)}
    print_comparison({**facts, **ranges, "idle_by_cause": rows, "collectives": rows})


def recorded_ops(sample: Sample) -> None:
    from lmworks.cli.trace_report import print_pipeline, print_predicted

    seconds = {"predicted_s": 0.11204, "measured_s": 0.12118, "wrong_s": -0.00914, "floor_s": 0.08032}
    row = {"op": "waiting for the host", "pass": "recompute", **seconds, "flops_per_s": 5.72e14, "bytes_per_s": 4.07e11}
    whole = {f"{what}_{side}_s": 0.2 for what in ("step", "unassigned") for side in ("predicted", "measured")}
    print_predicted({"predicted": {**whole, "rows": [row]}})
    times = {"step_s": 1234.5, "window_s": 1234.5, "busy_s": 1000.0}
    shares = dict.fromkeys(("measured", "replayed", "schedule", "of_step"), 0.352)
    print_pipeline({"pipeline": {"ranks": [{"rank": 127, "stages": [0, 15, 31], **times, **shares}]}})


def quantized(sample: Sample) -> None:
    from lmworks.cli.quantize import print_quantized

    layer = SimpleNamespace(name="blocks.31.mlp.down.weight", error=0.012345, rounded_error=0.0234)
    figures = {"bytes_before": 16_060_522_496, "bytes_after": 5_700_000_000, "limit": 0.01, "increase": 0.0042}
    report = SimpleNamespace(worst=lambda count: [layer] * count, scheme="int4", **figures)
    report.to_dict = lambda: {"perplexity_before": 6.1234, "perplexity_after": 6.1489}
    print_quantized(report, Path("q"))  # type: ignore[arg-type]


def evaluated(sample: Sample) -> None:
    from lmworks.cli.evals import print_comparisons, print_results
    from lmworks.evals.compare import Comparison

    found = {"value": 0.123456, "low": 0.081234, "high": 0.181234}
    metrics = {"pass@1": found, "pass@10": found}
    print_results({"humaneval-infilling": {"problems": 1033, "samples": 20660, "metrics": metrics, "errors": 3}})
    figures = (0.4123, 0.3512, -0.0611, -0.1012, -0.0213, 12, 75, 0.00012, "paired permutation")
    print_comparisons([Comparison("humaneval-infilling", "accuracy_norm", 1033, *figures)])


def simulated(sample: Sample) -> None:
    from lmworks.cli.prove import print_simulation

    row = SimpleNamespace(kind="reduce-scatter", group="dp_shard", ranks=128, count=252, bytes=12_884_901_888)
    held = {"parameters": 2**30, "gradients": 2**29, "activations": 3 * 2**30}
    found = SimpleNamespace(parameters=8_030_261_248, parameter_bytes=2**34, collectives=[row], resident=held)
    found.peak, found.peak_bytes, found.moment = held, sum(held.values()), "backward of the last micro-batch"
    where = {"rank": 777, "world": 1024, "place": {"tp": 1}, "stages": [], "micro_batches": 16}
    print_simulation(SimpleNamespace(simulation=found, how="exact", notes=[], seconds=3.0, **where))  # type: ignore[arg-type]


def parity(sample: Sample) -> None:
    from lmworks.prove.parity import Result

    calls = [{"count": 12, "kind": "all-gather", "group": "dp_shard", "bytes": 123456}] * 3
    row = Result("fsdp2-tp2-sp", 4, 1e-7, 2.5e-6, "blocks.0.attention.qkv.weight", 3e-7, tokens=1024, collectives=calls)
    sample.patch.setattr("lmworks.cli.prove.run_parity", lambda *_, **__: [row])
    sample.lmworks("parity", "--layouts", "fsdp2")


def chaos(sample: Sample) -> None:
    from lmworks.prove.chaos.harness import Outcome

    found = [Outcome(injected=row.pop("struck"), **row) for row in result("chaos.json")]
    sample.patch.setattr("lmworks.prove.chaos.harness.open_harness", lambda out: nullcontext())
    sample.patch.setattr("lmworks.prove.chaos.harness.run_trials", lambda *_: found)
    sample.lmworks("chaos", "--trials", "1")


def study(sample: Sample, module: str, command: str, kept: str, columns: list[str]) -> None:
    """The kept report has the same columns in another order."""
    names, rows = markdown(kept)
    table = columns, [[row[names.index(name)] for name in columns] for row in rows]
    report = "lmworks.bench.data_parallel_report" if command == "ddp-fsdp" else "lmworks.bench.precision.report"
    found = SimpleNamespace(spec=SimpleNamespace(model=SimpleNamespace(params=3_084_032)), outcomes=[])
    sample.patch.setattr(f"{module}.study", lambda *_: found)
    sample.patch.setattr(f"{report}.overview_table", lambda _: table)
    sample.patch.setattr(f"{report}.write_reports", lambda *_: (Path("report.md"), Path("report.html")))
    sample.prints("study", command, "tiny")


def ddp_fsdp(sample: Sample) -> None:
    columns = ["strategy", "tokens/s", "to DDP", "state", "peak", "sent a step", "calls", "as worked out", "start"]
    study(sample, "lmworks.bench.data_parallel", "ddp-fsdp", "ddp_fsdp_cpu.md", [*columns, "checkpoint"])


def precision(sample: Sample) -> None:
    columns = ["precision", "held-out loss", "gap", "speed", "peak", "bytes/parameter", "verdict"]
    study(sample, "lmworks.bench.precision.study", "precision", "precision_cpu.md", columns)


def overlap(sample: Sample) -> None:
    from lmworks.bench.overlap import OverlapStudy, Setting, Spread
    from lmworks.cli.bench_overlap import print_study
    from lmworks.spec import load_run

    spread = Spread(0.1234, -0.0123, 0.2345)
    own = Setting("as the spec says", {}, 1.234, Spread(0, 0, 0), spread, 0.123, 0.0456, 123_456_789)
    other = Setting(
        "parallel.sync_each_pass=true", {"sync_each_pass": True}, 12.34, spread, spread, 1.23, 4.56e-4, 1_234_567_890
    )
    machine = ("NVIDIA H200", "nccl")
    print_study(
        OverlapStudy(load_run("tiny", ["parallel.dp=2"]), 2, 10, *machine, 1.1, own, [other], other, {"a": "b"})
    )


def collectives(sample: Sample) -> None:
    from lmworks.bench.collectives import Row
    from lmworks.cli.bench_collectives import print_collectives, series
    from lmworks.plan.devices.alpha_beta import AlphaBeta, Regime

    rows = [
        Row("reduce_scatter", "inter", 16, "bfloat16", in_place, size, took, 0.8 * took, 1.9 * took, 0.8 * took, 0)
        for size, took in ((2**10, 12.34), (2**30, 123_456.7))
        for in_place in (False, True)
    ]
    regimes = (
        Regime(0, 1.234e-5, 1.234e-10, (1.1e-5, 1.3e-5), (1.2e-10, 1.3e-10)),
        Regime(2**20, 1.2e-4, 1.1e-11, (1.1e-4, 1.3e-4), (1.0e-11, 1.2e-11)),
    )
    link = {"shape": "200mbit,5ms", "bandwidth": "tc tbf", "delay": "netem"}
    machine = {"backend": "nccl", "ranks": 16, "nodes": 2, "device": "NVIDIA H200"}
    fits = [{**series(rows[0]), "fit": AlphaBeta(regimes).to_dict()}]
    print_collectives({**machine, "link": link, "fits": fits}, rows, Path("profile.toml"), Path("links.png"))


def typed(*words: str) -> Callable[[Sample], object]:
    return lambda sample: sample.prints(*words)


def course(sample: Sample) -> None:
    """A workspace where nothing is written yet."""
    sample.prints("learn", "init", str(sample.folder / "course"))
    sample.patch.chdir(sample.folder / "course")
    sample.prints("learn", "list")
    sample.prints("learn", "progress")
    leave_run(sample.folder / "course" / "runs" / "fsdp-medium-2")
    sample.prints("learn", "benchmarks")


def tracks(sample: Sample) -> None:
    """Tracks, the cheat sheet and summaries, one of which is begun."""
    sample.prints("learn", "init", str(sample.folder / "course"))
    sample.patch.chdir(sample.folder / "course")
    sample.prints("learn", "tracks")
    sample.prints("learn", "tracks", "mastery")
    sample.prints("learn", "cheatsheet")
    sample.prints("learn", "summary", "zero_paper")
    sample.prints("learn", "summary")


def interview(sample: Sample) -> None:
    """Answers of a version that had no cards: what was missed is due."""
    sample.prints("learn", "init", str(sample.folder / "course"))
    sample.patch.chdir(sample.folder / "course")
    missed = '{"exercises": {}, "answers": {"rmsnorm/0": false, "playbook_data_parallel/1": false}}'
    (sample.folder / "course/.learn/progress.json").write_text(missed)
    sample.prints("learn", "review")
    sample.prints("learn", "interview", "--list")


def leave_run(folder: Path) -> None:
    """As the course's trainers do."""
    about = {"trainer": "fsdp", "model_size": "medium", "world_size": 2, "device": "cuda", "parameters": 0,
             "max_steps": 10, "batch_size": 8, "seq_len": 1024, "grad_accum_steps": 4, "mixed_precision": "bf16",
             "gradient_checkpointing": True}  # fmt: skip
    line = {"grad_norm": 1.0, "lr": 3e-4, "seconds": 65536 / 123456, "tokens_per_s": 123456, "memory": 12 << 30}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about))
    lines = ({"step": step, "loss": 10 - step / 10, **line} for step in range(1, 11))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with zipfile.ZipFile(folder / "checkpoint.pt", "w") as archive:
        archive.writestr("archive/version", "3")


def validated(sample: Sample) -> None:
    """One source, and the parts that are printed beside all of them."""
    from lmworks.cli.plan_validate import print_parts, print_report
    from lmworks_validation.components import components
    from lmworks_validation.replay import replay

    print_report(replay(None, "torchtitan"))
    print_parts(components(None))


def validated_own(sample: Sample) -> None:
    from lmworks.cli.plan_validate import print_own
    from lmworks.plan.tables.score import Scored, errors_of

    names = ("row 12 llama3-70b 256×H100-SXM-80GB dp32 tp8 seq 8192", "runs/first-attempt-at-a-higher-learning-rate")
    scored = [
        Scored(name, figure, 12.0, 14.3, group, (10.0, 14.0), 0.41)
        for name in names
        for figure in ("step time", "allocated", "reserved")
        for group in ("bf16", "experts")
    ]
    lines = [line.to_dict() for line in errors_of("measurements/of-the-other-cluster.csv", scored)]
    print_own({"lines": lines, "runs": {}, "not_compared": [f"{names[0]}: nothing is measured"]}, False)


def coordinates(sample: Sample) -> None:
    from lmworks.cli.bench_coordinates import print_check

    sizes = [64, 128, 256, 512, 1024, 2048]
    curve = {"size": [[0.1234, 12.34]] * len(sizes), "slopes": [-0.5, 2.91], "change_slopes": [0.0, -0.12]}
    steepest = {"mup": {"role": "residual stream", "slope": 2.91}}
    print_check(
        {"axis": "width", "sizes": sizes, "roles": {"mup": {"residual stream": curve}}, "steepest": steepest}, 8, 0.002
    )


def positions(sample: Sample) -> None:
    from lmworks.cli.train import print_positions
    from lmworks.train.evaluate import PositionLoss

    print_positions([PositionLoss(65_536, 131_071, 12.3456, 123_456_789)])


def sweeps(sample: Sample) -> None:
    """One of `lmworks tune`, and what three commands say of it."""
    from lmworks.cli.sweep_display import print_trials
    from lmworks.cli.tune import print_outcome, print_rungs
    from lmworks.sweep.folder import Sweep
    from lmworks.sweep.progress import Progress
    from lmworks.sweep.space import Space
    from lmworks.tune.outcome import outcome_of
    from lmworks.tune.stoppers import stopper_of

    space = Space.of({
        "optim.lr": {"range": [1e-4, 1e-1], "log": True}, "optim.weight_decay": {"range": [0.01, 1.0]},
        "optim.schedule": {"values": ["cosine", "constant"]},
    })  # fmt: skip
    base = {"name": "a-search", "model": {"preset": "tiny"}, "optim": {"steps": 100_000}}
    sweep = Sweep.create(sample.folder / "sweeps" / "a-search", base, space, "tune")
    for number in range(3):
        point = {"optim.lr": 0.012345 * (number + 1), "optim.weight_decay": 0.123456, "optim.schedule": "constant"}
        trial = sweep.propose(point)
        result = {"step": 100_000, "val_step": 100_000, "val_loss": 12.3456, "loss": 12.3456, "tokens": 0}
        sweep.write(replace(trial, state="finished", step=100_000, result=result))
    print_trials(f"Trials of {sweep.path}", Progress(sweep, 1).update(sweep.trials()))
    print_outcome(outcome_of(sweep))
    print_rungs(stopper_of("hyperband", 81, 1_000, 81_000, 3), 81)
    sample.prints("runs")


def curated(sample: Sample) -> None:
    """Documents that several stages drop, and a classifier of two kinds of them."""
    for kind in ("chosen", "raw"):
        (sample.folder / kind).mkdir()
        for number in range(40):
            text = f"# {kind} {number}\n" + f"{kind}_{number % 9} = {number}\n" * (1 + number % 7)
            (sample.folder / kind / f"{number}.py").write_text(text if number else "x" * 5000)
    chosen, raw = str(sample.folder / "chosen"), str(sample.folder / "raw")
    sample.prints(
        "data", "curate", chosen, raw, "--rules", "code", "--dedup", "exact,minhash", "--out", f"{chosen}-clean"
    )
    sample.prints("data", "quality", chosen, "--raw", raw, "--out", f"{chosen}.npz")


def tried_mixtures(sample: Sample) -> None:
    from lmworks.sweep.folder import Sweep
    from lmworks.sweep.space import Space

    names = [str(sample.folder / name) for name in ("a-folder-of-code", "a-folder-of-prose")]
    base = {"name": "mixtures", "model": {"preset": "tiny"}, "data": {"mix": dict.fromkeys(names, 0.5)}}
    sweep = Sweep.create(sample.folder / "mixtures", base, Space(()), "sweep")
    spec = RunSpec.from_dict(base)
    for number in range(8):
        mix = dict(zip(names, ((number + 1) / 10, 1 - (number + 1) / 10), strict=True))
        trial = sweep.propose({"seed": number})
        RunFolder.create(sweep.folder(number).path, spec.replace(data=spec.data.replace(mix=mix)))
        sweep.write(replace(trial, state="finished", step=1, result={"step": 1}))
    loaded = SimpleNamespace(spec=spec, model=None)
    sample.patch.setattr("lmworks.train.load_run.load_trained", lambda path: replace_mix(loaded, path))
    sample.patch.setattr("lmworks.train.evaluate.held_out", lambda spec: spec)
    sample.patch.setattr(
        "lmworks.train.evaluate.evaluate",
        lambda share, spec, *_: SimpleNamespace(loss=2 + (1.1 - share if spec.data.path == names[0] else share) ** 2),
    )
    sample.prints("data", "fit-mix", str(sweep.path))


def replace_mix(loaded: SimpleNamespace, path: Path) -> SimpleNamespace:
    """A run whose model is the share of the first source."""
    return SimpleNamespace(spec=loaded.spec, model=next(iter(RunFolder.open(path).spec().data.mix.values())))


def ladder(sample: Sample) -> None:
    (sample.folder / "ladder.toml").write_text(
        'spec = "tiny"\nparams = [1e6, 8e6]\nflops = [1e15, 1e16]\nschedule = "wsd"\nmax_epochs = 1e6\n'
    )
    sample.prints("scaling", "run", "ladder.toml", "--dry-run")


# What prints tables, and in which functions: by file and name, as the test finds them in the source.
SAMPLES: list[tuple[Callable[[Sample], object], str]] = [
    (bench_offline, "bench_inference.print_throughput"),
    (overlap, "bench_overlap.print_study"),
    (coordinates, "bench_coordinates.print_check"),
    (collectives, "bench_collectives.print_collectives bench_collectives.print_fits"),
    (typed("plan", "collective", "all_reduce", "--cluster", "1024xh100"), "plan_collective.print_comparison"),
    (
        typed("plan", "collective", "all_to_all", "--cluster", "4xh100", "--schedule", "bruck"),
        "plan_collective.show_schedule",
    ),
    (bench_kernels, "bench.print_kernels"),
    (bench_serve, "bench_inference.print_load_test"),
    (bench_train, "bench.print_step bench.parts_table bench.kernels_table"),
    (chaos, "prove.chaos"),
    (typed("chaos", "--list"), "prove.print_faults"),
    (checkpoints, "checkpoint.ls"),
    (contents, "checkpoint.print_contents"),
    (lambda sample: data(sample, "inspect"), "data.print_survey"),
    (lambda sample: data(sample, "window"), "data.window"),
    (curated, "data_curate.print_curated data_quality.quality"),
    (tried_mixtures, "data_mix.fit_mix"),
    (demo, "demo.compare"),
    (diagnosed, "diagnose.print_diagnosis"),
    (typed("hardware"), "plan_lookup.print_catalogue"),
    (machine, "plan_lookup.print_machine"),
    (health, "runs.print_stats"),
    (typed("mesh", "tiny", *LAYOUT), "plan_lookup.mesh"),
    (typed("models"), "plan_lookup.models"),
    (parity, "prove.parity"),
    (typed("pipeline", "tiny", *LAYOUT), "plan_lookup.print_stages plan_lookup.print_timeline"),
    (typed("plan", "llama3-8b", GPU, *LAYOUT[1:]), "plan.print_memory plan.print_calls plan.print_time"),
    (measured_links, "plan_validate.print_links"),
    (typed("plan", "memory", "llama3-8b", GPU, *LAYOUT[1:]), "plan.print_budget plan.print_stages"),
    (
        typed("plan", "run", "llama3-1b", GPU, "align.method=grpo", 'align.rewards=["exact"]', "data.seq=1024"),
        "plan.print_phases plan.print_rounds",
    ),
    (typed("plan", "run", str(CONFIGS / "code" / "4b-pretrain.toml")), "plan.print_run_stages"),
    (typed("plan", "reliability", "--gpus", "1024", "--every", "50"), "plan_reliability.print_forecasts"),
    (typed("plan", "search", "gpt2-small", "--cluster", "2xh100", "--cluster", "2xa100"), "plan_search.print_front"),
    (typed("plan", "serve", "llama3-70b", "--gpu", "H100-SXM-80GB"), "plan_serve.print_plans plan_serve.print_chosen"),
    (validated, "plan_validate.print_report plan_validate.print_parts"),
    (validated_own, "plan_validate.print_own"),
    (predicted, "plan_validate.print_predictions"),
    (
        lambda sample: sample.prints("profile", "trace", str(TRACES / "ddp_nccl.json.gz")),
        "trace_report.print_steps trace_report.print_collectives trace_report.print_ops",
    ),
    (recorded_ops, "trace_report.print_predicted trace_report.print_pipeline"),
    (profile, "profile_engine.print_profile"),
    (memory_snapshot, "profile_memory.print_snapshot"),
    (compared_recordings, "profile_compare.print_comparison"),
    (typed("evals", "list"), "evals.list_suites"),
    (typed("fleet", "simulate", "llama3-8b", "--generate", "bursty", "--seconds", "20"), "fleet.print_run"),
    (
        typed("fleet", "simulate", "llama3-8b", "--generate", "bursty", "--seconds", "20", "--front", "--most", "2"),
        "fleet.print_front",
    ),
    (fitted_steps, "fleet.print_fitted"),
    (planned_fleet, "fleet.print_fleet"),
    (lacking_fleet, "fleet.print_lacking"),
    (fleet_status, "fleet.print_status"),
    (served_demo, "fleet.print_demo"),
    (typed("drill", "list"), "drill.list_drills"),
    (drilled, "drill.print_summary"),
    (
        tenants_of_a_gateway,
        "gateway_tenants.list_keys gateway_tenants.show_tenants gateway_tenants.usage gateway_tenants.audit",
    ),
    (typed("plan", "kv-tiers", "llama3-8b", "--gpu", "h100"), "plan_kv_tiers.kv_tiers"),
    (evaluated, "evals.print_results evals.print_comparisons"),
    (quantized, "quantize.print_quantized"),
    (listed, "runs.print_list"),
    (compared, "runs.print_comparison"),
    (show, " ".join(f"runs.print_{part}" for part in ("attempts", "time", "predicted", "interval", "events", "stats"))),
    (calibrated, "plan_from_runs.print_calibration"),
    (
        typed("scaling", "fit", str(POINTS), "--replicates", "10"),
        "scaling.print_result scaling.print_optimum",
    ),
    (
        typed("scaling", "recommend", "chinchilla", "--flops", "1e19", "--cluster", "1xh100", "--serve", "1e12"),
        "scaling_recommend.print_recommendation scaling_recommend.print_serving",
    ),
    (ladder, "scaling_run.print_plan"),
    (positions, "train.print_positions"),
    (sweeps, "sweep_display.print_trials tune.print_outcome tune.print_rungs runs_sweeps.print_sweeps"),
    (typed("tune", "seeds", "--std", "1.63"), "tune.seeds"),
    (course, "learn.list_exercises learn.progress learn_plan.benchmarks"),
    (tracks, "learn_tracks.tracks learn_cheat_sheet.print_one learn_cheat_sheet.summary"),
    (interview, "learn_interview.print_questions learn_interview.review"),
    (simulated, "prove.print_simulation"),
    (ddp_fsdp, "bench.ddp_fsdp"),
    (precision, "bench.precision"),
]
