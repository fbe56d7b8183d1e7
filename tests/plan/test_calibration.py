"""`lmworks plan calibrate --from-runs`: constants of simulated runs are found within their intervals, and written so
that plans with the file say what the fit said.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.plan.calibration.factors import CONSTANTS, Factors, slower_profile
from lmworks.plan.calibration.fit import (
    ContradictoryRuns,
    Fit,
    FittedRun,
    Problem,
    TooFewRuns,
    check_agreement,
    fit,
    linearised,
    student_90,
)
from lmworks.plan.calibration.priced_run import PricedRun, price_of_case, price_of_run
from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.devices.profile import Profile, load_profile
from lmworks.plan.predict import predict
from lmworks.plan.step.price import price
from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import Cluster, RunSpec, catalogue, load_run
from typed import lmworks

SPREAD = 0.3  # of the logarithms of true factors
NOISE = 0.03
LINKS = {
    "gpus": ["a CPU, 2 threads"],
    "link_gbs": 1.0,
    "fabric": "pcie",
    "sizes": [1024, 1048576, 16777216],
    "tag": "measured",
    "all-reduce": {"2": [50.0, 1000.0, 16000.0]},
}
# Short and long sequences, few and many tokens, narrow and wide: no constant has the same share in all.
JOBS = (
    "tiny data.seq=64 data.micro_batch=1",
    "tiny data.seq=512 data.micro_batch=4",
    "cpu-3m data.seq=64 data.micro_batch=2",
    "cpu-3m data.seq=1024 data.micro_batch=1",
    "cpu-3m data.seq=256 data.micro_batch=8",
    "cpu-10m data.seq=128 data.micro_batch=2",
    "cpu-10m data.seq=128 data.micro_batch=2 data.global_batch=8",
    "cpu-10m data.seq=1024 data.micro_batch=4",
    "cpu-10m data.seq=512 data.micro_batch=2 parallel.recompute=full",
    "gpt2-small data.seq=128 data.micro_batch=1",
)


def cpu_profile() -> Profile:
    rates = {
        kind: (Rate((1e4,), 1e10), Rate((1e8,), 5e9)) for kind in ("stream", "strided", "exp", "tanh", "optimizer")
    }
    rates["gemm.fp32"] = (Rate((512, 128, 128), 5e10), Rate((2048, 1024, 1024), 1e11))
    rates |= {f"{kind}.fp32": (Rate((128, 32), 2e10),) for kind in ("attention", "attention_backward")}
    return Profile(Machine("a CPU, 2 threads", "cpu", "measured", rates, 8e-6, 1.2e-5, 2**34, 1.03), LINKS)


def job(text: str, *more: str) -> RunSpec:
    preset, *words = text.split()
    return load_run(preset, ["model.context=1024", *words, "cluster.device=cpu", *more])


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Exact: on a CPU a step is linear in the factors."""
    runs = [PricedRun(text, 1.0, found) for text in JOBS if (found := price_of_run(job(text), cpu_profile()))]
    assert len(runs) == len(JOBS)
    return linearised(runs, np.zeros(len(CONSTANTS)))


def simulated(problem: Problem, logs: Any, noise: Any) -> list[PricedRun]:
    seconds = problem.seconds(logs) * np.exp(noise)

    def priced(place: int) -> Callable[[Factors], float]:
        return lambda factors: float(problem.seconds(factors.logs)[place])

    return [PricedRun(text, float(seconds[place]), priced(place)) for place, text in enumerate(JOBS)]


def held(found: Fit, logs: Any, width: float = 1.0) -> list[bool]:
    """Whether the interval of each constant that was identified, so many times as wide, holds the truth."""
    names = list(CONSTANTS)
    inside = []
    for one in found.constants:
        if one.low and one.high:
            low, high = (math.log(one.factor) + width * math.log(end / one.factor) for end in (one.low, one.high))
            inside.append(low <= logs[names.index(one.name)] <= high)
    return inside


@pytest.mark.slow
def test_true_constants_lie_within_nine_intervals_in_ten(problem: Problem) -> None:
    """Over draws of constants and noise. Intervals of half the width fail the same bound, and so would a 90 % interval
    that forgets the constants that were not identified, or the noise that nobody knows."""
    draw = np.random.default_rng(0)
    whole, half, widths = [], [], []
    for _ in range(40):
        logs = np.zeros(len(CONSTANTS))
        logs[:4] = draw.normal(0, SPREAD, 4)  # one rank: it has no links
        found = fit(simulated(problem, logs, draw.normal(0, NOISE, len(JOBS))))
        whole += held(found, logs)
        half += held(found, logs, 0.5)
        widths += [math.log(one.high / one.low) for one in found.constants if one.low and one.high]
    assert len(whole) > 80
    assert 0.85 <= np.mean(whole) <= 0.99
    assert np.mean(half) < 0.8
    assert np.median(widths) < 0.35  # against 1.64 before a run was seen


def test_exact_runs_tell_exact_constants(problem: Problem) -> None:
    logs = np.log([1.4, 0.7, 1.2, 0.8, 1.0, 1.0])
    found = fit(simulated(problem, logs, np.zeros(len(JOBS))))
    identified = {one.name: one for one in found.constants if one.identified}
    assert {"kernels", "passes"} <= identified.keys()
    for name, true in zip(CONSTANTS, np.exp(logs), strict=True):
        if name in identified:
            assert identified[name].factor == pytest.approx(true, rel=0.03)
    assert {one.name: one.kept for one in found.constants}["links"] == "less than 0.5% of every step"
    assert found.score("before").mape > 0.1 > 0.02 > found.score("after").mape
    assert found.score("left_out").mape < 0.3 * found.score("before").mape


def test_what_the_runs_cannot_tell_keeps_its_prior(problem: Problem) -> None:
    """Jobs in which products and all else have the same shares tell how slow the machine is, and no more."""
    alike = dataclasses.replace(
        problem,
        rest=np.zeros(6),
        slopes=np.outer(np.arange(1.0, 7.0), [0.5, 0.05, 0.45, 0.0, 0.0, 0.0]),
        measured=np.zeros(6),
    )
    runs = [
        PricedRun(f"job {place}", 1.5 * (place + 1), lambda f, p=place: float(alike.seconds(f.logs)[p]))  # type: ignore
        for place in range(6)
    ]
    found = fit(runs)
    kernels, attention, passes, *_ = found.constants
    assert kernels.identified and kernels.factor == pytest.approx(1.5, rel=0.01)
    assert (attention.factor, passes.factor) == (1.0, 1.0)
    assert attention.kept == "at most 5% of a step" and "not told apart" in passes.kept
    assert kernels.high and kernels.low and kernels.high / kernels.low > 1.5  # passes may be the cause
    assert found.score("after").mape < 0.05


def test_a_left_out_job_was_in_no_fit_of_its_own(problem: Problem) -> None:
    """A job that no constant explains is as far off in the fit of the others, whose constants it does not move."""
    runs = simulated(problem, np.log([1.3, 1, 1, 1, 1, 1]), np.zeros(len(JOBS)))
    odd = runs[4].measured
    runs[4] = dataclasses.replace(runs[4], measured=1.4 * odd)
    found = fit(runs)
    assert found.runs[4].left_out == pytest.approx(odd, rel=0.02)
    assert found.runs[4].after > 1.02 * odd


def test_repeats_are_left_out_together(problem: Problem) -> None:
    runs = simulated(problem, np.log([1.3, 1, 1, 1, 1, 1]), np.zeros(len(JOBS)))
    twice = [*runs, dataclasses.replace(runs[4], label="again", measured=1.2 * runs[4].measured)]
    found = fit(twice)
    assert found.jobs == len(JOBS)
    assert found.runs[4].left_out == pytest.approx(runs[4].measured, rel=0.02)
    assert found.runs[4].left_out == found.runs[-1].left_out


def test_too_few_and_contradictory_runs_are_refused(problem: Problem) -> None:
    runs = simulated(problem, np.zeros(len(CONSTANTS)), np.zeros(len(JOBS)))
    again = [dataclasses.replace(runs[0], label=f"again {n}") for n in range(4)]
    with pytest.raises(TooFewRuns, match=r"^6 runs of 2 jobs cannot be fitted: at least 3 are needed that differ in"):
        fit([*runs[:2], *again])
    with pytest.raises(TooFewRuns, match=r"^0 jobs cannot be fitted"):
        fit([])
    slow = dataclasses.replace(runs[3], label="slow", measured=1.6 * runs[3].measured)
    with pytest.raises(ContradictoryRuns, match=r"cpu-3m data\.seq=1024 .* and slow are the same job to the planner"):
        fit([*runs, slow])
    fit([*runs, dataclasses.replace(slow, measured=1.4 * runs[3].measured)])
    strange = dataclasses.replace(runs[3], measured=8 * runs[3].measured)
    with pytest.raises(ContradictoryRuns, match=r"no constants agree with all runs: .* cpu-3m data\.seq=1024"):
        fit([*runs[:3], strange, *runs[4:]])
    near = FittedRun("near", 1.9, 1.0, 1.0, 1.0)
    check_agreement([near, FittedRun("far", 1.0, 1.0, 1.9, 1.9)])
    with pytest.raises(ContradictoryRuns):
        check_agreement([near, FittedRun("far", 1.0, 1.0, 2.1, 2.1)])


@pytest.mark.parametrize(("degrees", "quantile"), [(3, 2.353), (5, 2.015), (10, 1.812), (30, 1.697), (1e6, 1.645)])
def test_quantiles_of_students_t(degrees: float, quantile: float) -> None:
    """Against printed tables."""
    assert student_90(degrees) == pytest.approx(quantile, rel=0.01)


# --- the profile -----------------------------------------------------------------------------------------


def test_a_profile_with_factors_predicts_as_the_fit(tmp_path: Path) -> None:
    factors = Factors(1.3, 0.8, 1.1, 1.6, 1.7, 1.0)
    path = tmp_path / "fitted.toml"
    path.write_text(slower_profile(cpu_profile(), factors).to_toml())
    (tmp_path / "prior.toml").write_text(cpu_profile().to_toml())
    for text in (JOBS[4], f"{JOBS[4]} parallel.dp=2 data.global_batch=16"):
        prior = job(text, f"cluster.profile={tmp_path / 'prior.toml'}")
        priced = price_of_run(prior, cpu_profile())
        time = predict(job(text, f"cluster.profile={path}"), load_profile(path).machine).time
        assert priced and time and time.total == pytest.approx(priced(factors), rel=1e-9)
        assert priced(Factors()) == pytest.approx(predict(prior, cpu_profile().machine).to_dict()["step_s"], rel=1e-9)
        assert abs(priced(factors) / priced(Factors()) - 1) > 0.1


GPU_JOBS = (
    ("llama3-8b", 8, "tp=1 zero=3 micro_batch=1"),
    ("llama3-8b", 16, "tp=2 zero=3 micro_batch=1"),
    ("llama3-8b", 64, "tp=8 zero=1 micro_batch=2"),
    ("llama3-70b", 64, "tp=8 zero=3 micro_batch=1"),
    ("llama3-70b", 128, "tp=8 pp=4 zero=1 micro_batch=1"),
    ("llama2-7b", 8, "tp=1 zero=3 micro_batch=4"),
    ("llama2-7b", 256, "tp=1 zero=3 micro_batch=1"),
    ("llama2-13b", 32, "tp=4 zero=1 micro_batch=1"),
)
TRUE = Factors(1.25, 1.0, 1.15, 1.0, 1.3, 1.4)


def gpu_table(path: Path, factors: Factors) -> list[Case]:
    """A table of runs that took what the planner says with these factors."""
    columns = ("model", "gpu", "n_gpus", "tp", "pp", "zero", "micro_batch", "seq_len", "global_batch", "framework")
    rows = []
    for model, gpus, words in GPU_JOBS:
        layout = {"pp": "1", **dict(word.split("=") for word in words.split())}
        rows.append({"model": model, "gpu": "H100-SXM-80GB", "n_gpus": gpus, "seq_len": 8192, "global_batch": 512,
                     "framework": "lmworks", **layout})  # fmt: skip
    from lmworks.cli.plan_from_runs import table_steps

    def write(seconds: Sequence[float]) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns, "step_s"])
            writer.writeheader()
            writer.writerows({**row, "step_s": one} for row, one in zip(rows, seconds, strict=True))

    write([1.0] * len(rows))
    cases = [step.case for step in table_steps(path)[0] if step.case]
    assert len(cases) == len(rows)
    write([price_of_case(case)(factors) for case in cases])
    return cases


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    path = tmp_path_factory.mktemp("gpu") / "runs.csv"
    return path, gpu_table(path, TRUE)


def test_a_table_of_gpu_runs_becomes_a_profile(
    table: tuple[Path, list[Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path, cases), out = table, tmp_path / "fitted.toml"
    code, text, err = lmworks(capsys, "plan", "calibrate", "--from-runs", str(path), "--out", str(out), "--json")
    assert code == 0, err
    found = json.loads(text)
    identified = {one["name"]: one for one in found["constants"] if not one["kept"]}
    assert "kernels" in identified and identified["kernels"]["low"] < TRUE.kernels < identified["kernels"]["high"]
    assert found["errors"]["after"]["mape"] < 0.3 * found["errors"]["before"]["mape"]
    profile = load_profile(out)
    assert profile.machine.tag == "fitted" and profile.made and profile.made["from_runs"]["jobs"] == len(GPU_JOBS)
    for case, run in zip(cases, found["runs"], strict=True):
        assert float(price(case).seconds) == pytest.approx(run["before"], rel=1e-6)
        cluster = case.cluster.replace(profile=str(out))
        assert float(price(case.replace(cluster=cluster)).seconds) == pytest.approx(run["after"], rel=1e-6)
    # It has factors on the laws of an accelerator, which a plan must name.
    code, _, err = lmworks(capsys, "plan", "gpt2-small", f"cluster.profile={out}")
    assert code == 2 and "was fitted on H100-SXM-80GB; name that accelerator: cluster.gpu=H100-SXM-80GB" in err
    words = ("plan", "gpt2-medium", "precision.dtype=bf16", "cluster.gpu=h100", "data.micro_batch=32", "--json")
    plain, fitted = (json.loads(lmworks(capsys, *words, *more)[1]) for more in ((), (f"cluster.profile={out}",)))
    assert fitted["step_s"] > 1.02 * plain["step_s"] and fitted["tags"]["matmul"] == "fitted"


def test_factors_of_a_gpu_are_those_of_its_profile(tmp_path: Path) -> None:
    """All of them, launches too, in a job that waits for its host; whichever attention kernel a code base has."""
    from lmworks.plan.calibration.factors import law_profile
    from lmworks.plan.software import SOFTWARE

    gpu, factors = catalogue()["H100-SXM-80GB"], Factors(1.2, 0.9, 1.1, 1.5, 1.3, 1.4)
    path = tmp_path / "fitted.toml"
    path.write_text(slower_profile(law_profile(Machine.of(gpu), ["bf16", "fp8"]), factors).to_toml())
    spec = load_run("gpt2-small", ["cluster.gpu=h100", "precision.dtype=bf16", "data.micro_batch=1", "data.seq=1024"])
    small = Case.of(spec, gpu).replace(cluster=Cluster(gpus_per_node=8))
    for case in (
        small,
        small.replace(dp_shard=16, zero=3, software=SOFTWARE["torchtitan"]),
        small.replace(tp=2, dp_shard=4, zero=1, dtype="fp8", micro_batch=8),
    ):
        told = case.replace(cluster=case.cluster.replace(profile=str(path)))
        assert float(price(told).seconds) == pytest.approx(price_of_case(case)(factors), rel=1e-9)
    host = price_of_case(small)
    assert host(Factors(launches=1.5)) > 1.05 * host(Factors())


# --- folders of runs -------------------------------------------------------------------------------------


SOME = (0, 1, 3, 4, 5)


def recorded(folder: Path, text: str, profile: Path, seconds: float, steps: int = 8) -> RunFolder:
    run = RunFolder.create(folder, job(text, f"cluster.profile={profile}"))
    with MetricsWriter(run.metrics_path, 0) as metrics:
        for step in range(1, steps + 1):
            metrics.write(step, {"loss": 1.0, "step_s": seconds * (3 if step == 1 else 1)})
    return run


def test_folders_of_runs(tmp_path: Path, problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    prior, out, runs = tmp_path / "prior.toml", tmp_path / "fitted.toml", tmp_path / "runs"
    prior.write_text(cpu_profile().to_toml())
    true = np.log([1.4, 1, 1.2, 0.8, 1, 1])
    for place in SOME:
        recorded(runs / str(place), JOBS[place], prior, float(problem.seconds(true)[place]))
    recorded(runs / "short", JOBS[0], prior, 1.0, steps=3)
    words = ("plan", "calibrate", "--from-runs", str(runs), "--out", str(out))
    code, text, err = lmworks(capsys, *words)
    assert code == 0, err
    assert "all kernels" in text and f"factors are on {prior}, which the runs name" in text
    assert "short: fewer than 5 measured steps" in text and "kept: collectives inside a machine: less than 0.5%" in text
    found = json.loads(lmworks(capsys, *words, "--json")[1])
    assert found["errors"]["left_out"]["mape"] < 0.5 * found["errors"]["before"]["mape"]
    machine = load_profile(out).machine
    for place, run in zip(SOME, found["runs"], strict=True):
        assert predict(job(JOBS[place]), machine).to_dict()["step_s"] == pytest.approx(run["after"], rel=1e-9)


@pytest.mark.slow
def test_real_runs_predict_one_that_was_left_out(tmp_path: Path) -> None:
    """Of this CPU, by what another one does: a job that was in no fit is predicted better than before."""
    from lmworks.cli.plan_from_runs import calibrate_from_runs
    from lmworks.train import Trainer

    prior = tmp_path / "prior.toml"
    prior.write_text(cpu_profile().to_toml())
    more = ("checkpoint.every=0", "log.eval_every=0", "log.eval_batches=1", "optim.steps=12", "optim.warmup=2")
    for place in (1, 2, 4, 5, 6):
        spec = job(JOBS[place], f"cluster.profile={prior}", "data.path=stdlib:bytes", *more)
        Trainer(spec, tmp_path / "runs" / str(place), quiet=True).run()
    found = calibrate_from_runs([tmp_path / "runs"], "", "cpu").fit
    before, left_out = found.score("before").mape, found.score("left_out").mape
    assert before > 0.2  # else there is nothing to gain
    assert left_out < 0.7 * before


def test_mistakes_are_told(table: tuple[Path, list[Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        out = tmp_path / "never.toml"
        code, _, err = lmworks(capsys, "plan", "calibrate", *words, "--out", str(out))
        assert code in (1, 2) and not out.exists()
        return err

    text, both = table[0].read_text(), tmp_path / "both.csv"
    both.write_text(text + text.splitlines()[1].replace("H100-SXM-80GB", "A100-SXM-80GB") + "\n")
    two = refused("--from-runs", str(both))
    assert "these runs are of 2 machines: H100-SXM-80GB (8), A100-SXM-80GB (1)" in two and "with --gpu" in two
    assert "at least 3 are needed" in refused("--from-runs", str(both), "--gpu", "a100-sxm-80gb")
    assert "no run on B200" in refused("--from-runs", str(both), "--gpu", "b200")
    assert "--gpu chooses among the runs" in refused("--gpu", "h100")
    assert "leave them out with --from-runs" in refused("--from-runs", str(both), "--quick")
    assert "does not exist" in refused("--from-runs", str(tmp_path / "nowhere"))
    (tmp_path / "none").mkdir()
    assert "no run with a measured step" in refused("--from-runs", str(tmp_path / "none"))
