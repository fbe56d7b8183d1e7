"""The sbatch script: no complaint from shellcheck, and what it asks for is what the layout needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lmworks.launch import Allocation, Job, slurm_script
from lmworks.spec import SpecError, load_run
from typed import lmworks

TWO = ("parallel.dp=2", "cluster.device=cpu")
VARIANTS = {
    "plain": Allocation(),
    "everything": Allocation("1-12:00:00", "gpu", "team", "docker://nvcr.io/x y:1", 16, 120, False),
    "site": Allocation(
        qos="high",
        lines=("--constraint=ib&h100", "#SBATCH --mail-user=a@b.c", '--comment="two words"'),
        variables=("NCCL_DEBUG=INFO", "EMPTY=", 'HOSTILE=a\'b "c" $(touch broken) `x` \\ ;#\n=é'),
        modules=("cuda/12.8", "a;b"),
    ),
}


def two_ranks(**options: str) -> Job:
    return Job.of(load_run("tiny", TWO), "tiny", TWO, nodes=2, **options)


@pytest.mark.parametrize("ask", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("run_dir", ["runs/tiny", 'runs/it\'s "here"'])
def test_bash_accepts_it(ask: Allocation, run_dir: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(two_ranks(run_dir=run_dir), ask))
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("ask", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("run_dir", ["runs/tiny", 'runs/it\'s "here"'])
def test_shellcheck_accepts_it(ask: Allocation, run_dir: str, shellcheck: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(two_ranks(run_dir=run_dir), ask))
    result = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}


def test_it_asks_for_what_the_layout_needs() -> None:
    spec = load_run("tiny", ["parallel.dp=8", "parallel.tp=2"])
    job = Job.of(spec, "tiny", nodes=2)
    found = directives(slurm_script(job, VARIANTS["everything"]))
    assert {"nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "time=1-12:00:00", "partition=gpu"} <= found
    assert {"account=team", "cpus-per-task=16", "signal=B:USR1@120", "no-requeue"} <= found
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 0" in slurm_script(job, Allocation())
    again = Job.of(spec.replace(fault={"max_restarts": 3}), "tiny", nodes=2)
    assert "--nproc-per-node 8 --max-restarts 3" in slurm_script(again, Allocation())
    assert {"exclusive", "requeue"} <= directives(slurm_script(job, Allocation()))
    assert not any("gpus" in line for line in directives(slurm_script(two_ranks(), Allocation())))


@pytest.mark.parametrize(("grace", "shutdown"), [(300, 270), (61, 31), (45, 30), (10, 30)])
def test_ranks_have_time_to_save_before_the_limit(grace: int, shutdown: int) -> None:
    script = slurm_script(two_ranks(), Allocation(grace=grace))
    assert f"signal=B:USR1@{grace}" in directives(script)
    assert f"\nexport TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown}\n" in script


def test_by_default_the_run_is_asked_to_stop_five_minutes_before_the_limit() -> None:
    assert "signal=B:USR1@300" in directives(slurm_script(two_ranks(), Allocation()))


def test_what_a_site_asks_for() -> None:
    script = slurm_script(two_ranks(), VARIANTS["site"])
    assert {"qos=high", "constraint=ib&h100", "mail-user=a@b.c", 'comment="two words"'} <= directives(script)
    assert script.index("#SBATCH --comment") < script.index("set -euo pipefail")  # sbatch reads no further


def test_modules_and_variables_reach_the_ranks_as_they_were_given(tmp_path: Path) -> None:
    """The script itself, run by bash up to where the ranks start, with a `module` that reads an unset variable."""
    before = slurm_script(two_ranks(), VARIANTS["site"]).split("# A job that comes back")[0]
    module = 'module() { echo "$UNSET loads $2"; }\n'
    show = '\nprintf \'%s|\' "$NCCL_DEBUG" "$EMPTY" "$HOSTILE" "$OMP_NUM_THREADS"; [[ $- == *u* ]] && echo strict'
    result = subprocess.run(["bash", "-c", module + before + show], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    hostile = 'a\'b "c" $(touch broken) `x` \\ ;#\n=é'
    assert result.stdout == f" loads cuda/12.8\n loads a;b\nINFO||{hostile}|1|strict\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "NAME"], "--env 'NAME' is not NAME=VALUE"),
        (["--env", "1A=2"], "--env '1A=2' is not NAME=VALUE"),
        (["--env", "A B=2"], "--env 'A B=2' is not NAME=VALUE"),
        (["--module", "a b"], "--module 'a b' must be one word"),
        (["--qos", "a b"], "--qos 'a b' must be one word"),
        (["--sbatch-line", "constraint=ib"], "--sbatch-line 'constraint=ib' is not an option of sbatch"),
        (["--sbatch-line=--mem=0\nrm -r x"], "is not an option of sbatch on one line"),
        (["--sbatch-line=--nodes=4"], "the script sets its own --nodes"),
        (["--sbatch-line=-N 4"], "the script sets its own --N"),
    ],
)
def test_what_a_site_cannot_ask_for(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = lmworks(capsys, "launch", "slurm", "tiny", *options)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--qos", "high", "--module", "cuda", "--env", "A=1", "--env", "B=2", "--sbatch-line=--mem=0"]
    code, out, _ = lmworks(capsys, "launch", "slurm", "tiny", *site)
    assert code == 0 and {"qos=high", "mem=0"} <= directives(out)
    assert "\nmodule load cuda\n" in out and "\nexport A=1\nexport B=2\n" in out


@pytest.mark.parametrize("ask", [Allocation(time="soon"), Allocation(partition="a b"), Allocation(account="a\nb")])
def test_what_slurm_would_not_take_is_refused(ask: Allocation) -> None:
    with pytest.raises(SpecError, match=r"--(time|partition|account)"):
        slurm_script(two_ranks(), ask)
