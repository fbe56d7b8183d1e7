"""The sbatch script: no complaint from shellcheck, and what it asks for is what the layout needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.launch import Allocation, Job, slurm_script
from lmworks.spec import SpecError, load_run

TWO = ("parallel.dp=2", "cluster.device=cpu")
VARIANTS = {
    "plain": Allocation(),
    "everything": Allocation("1-12:00:00", "gpu", "team", "docker://nvcr.io/x y:1", 16, 120, False),
}


def two_ranks(**options: str) -> Job:
    return Job.of(load_run("tiny", TWO), "tiny", TWO, nodes=2, **options)


@pytest.mark.parametrize("ask", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("run_dir", ["runs/tiny", 'runs/it\'s "here"'])
def test_shellcheck_and_bash_accept_it(ask: Allocation, run_dir: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(two_ranks(run_dir=run_dir), ask))
    for command in (["bash", "-n", script], [Path(sys.executable).with_name("shellcheck"), script]):
        result = subprocess.run(command, capture_output=True, text=True)
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


@pytest.mark.parametrize("ask", [Allocation(time="soon"), Allocation(partition="a b"), Allocation(account="a\nb")])
def test_what_slurm_would_not_take_is_refused(ask: Allocation) -> None:
    with pytest.raises(SpecError, match=r"--(time|partition|account)"):
        slurm_script(two_ranks(), ask)
