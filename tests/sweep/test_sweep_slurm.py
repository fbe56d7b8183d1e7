"""Workers as a Slurm array: the script, and (where Slurm is installed) a cluster of one node that runs it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweeps import SECONDS, check, make_sweep, until

from lmworks.spec import LMWorksError, SpecError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.slurm import Array, SlurmWorkers, array_script, submit_array
from typed import lmworks

ONE = {"seed": {"values": [1]}}


def test_the_script_asks_for_a_trial_of_cores_and_gpus_a_worker(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / 'it\'s "here"', dataset, ONE, threads=2)
    ask = Array(16, cores=8, gpus=4, time="4:00:00", partition="gpu", lines=("--mem=8G", "#SBATCH --qos=high"))
    text = array_script(sweep, ask)
    for option in ("array=0-15", "cpus-per-task=8", "gpus-per-node=4", "time=4:00:00", "partition=gpu", "mem=8G"):
        assert f"#SBATCH --{option}\n" in text
    assert "#SBATCH --qos=high\n" in text and "export OMP_NUM_THREADS=2\n" in text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "gpus-per-node" not in array_script(sweep, Array(2, cores=1))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Array(2, 1, time="soon"), "--time 'soon' is not a Slurm time"),
        (Array(2, 1, lines=("--array=0-9",)), "the script sets its own --array"),
        (Array(2, 1, lines=("--signal=TERM",)), "the script sets its own --signal"),
    ],
)
def test_what_the_script_cannot_ask_for(ask: Array, said: str, tmp_path: Path, dataset: Path) -> None:
    with pytest.raises(SpecError, match=said):
        array_script(make_sweep(tmp_path / "sweep", dataset, ONE), ask)


def test_sbatch_that_is_missing_or_refuses(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, ONE)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(SpecError, match=r"there is no sbatch on this machine; submit .*workers.sbatch where Slurm is"):
        submit_array(sweep, Array(2, 1))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sbatch"
    program.write_text("#!/bin/bash\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(LMWorksError, match=r"sbatch refused .*workers.sbatch: sbatch: error: no such partition"):
        submit_array(sweep, Array(2, 1))
    program.write_text("#!/bin/bash\necho '17;cluster'\n")
    assert submit_array(sweep, Array(2, 1)) == (sweep.path / "workers.sbatch", "17")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "--ray"], "--slurm and --ray both say where the workers run"),
        (["--partition", "gpu"], "--time, --partition and --sbatch-line are Slurm's; add --slurm"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = lmworks(capsys, "sweep", "spec.toml", "--space", "space.toml", *words)
    assert code == 2 and said in err


def test_an_array_ends_when_slurm_no_longer_has_it(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver waits for it, and cancels it when it leaves; Slurm is three scripts around a file here."""
    queue, programs = tmp_path / "queue", tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "sbatch": f"echo job > {queue}; echo once >> {queue}s; echo '17;cluster'",
        "squeue": f'[[ "$*" == *17* ]] && cat {queue} 2>/dev/null; true',
        "scancel": f'[[ "$1" == 17 ]] && rm -f {queue}',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("lmworks.sweep.slurm.LOOK_S", 0.0)
    sweep = make_sweep(tmp_path / "sweep", dataset, ONE)
    sweep.propose({"seed": 1})
    with SlurmWorkers(sweep, Array(2, 1)) as workers:
        (job,) = workers.processes
        assert workers.count == 2 and job.poll() is None
    assert job.poll() == 0 and not queue.exists()
    (programs / "squeue").write_text("#!/bin/bash\n")  # every job ends at once
    with SlurmWorkers(sweep, Array(2, 1)) as workers, pytest.raises(LMWorksError, match=r"settle no trial; see .*sl"):
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
    assert (tmp_path / "queues").read_text().split() == ["once"] * 5


# --- a real one ------------------------------------------------------------------------------------------

CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthInfo=socket={root}/munge/socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """munged, slurmctld and slurmd on this machine."""
    if os.getuid() or not all(shutil.which(name) for name in ("munged", "slurmctld", "slurmd", "sbatch")):
        pytest.skip("needs root and Slurm (Debian: apt-get install slurm-wlm)")
    root = Path("/tmp") / f"lmworks-slurm-{os.getpid()}"  # a socket's path must be short
    for name in ("munge", "state", "spool"):
        (root / name).mkdir(parents=True, mode=0o755)
    munge, conf = root / "munge", root / "slurm.conf"
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    conf.write_text(CONF.format(host=socket.gethostname(), root=root, cores=os.cpu_count()))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    files = [f"--{kind}={munge / kind.partition('-')[0]}" for kind in ("key-file", "pid-file", "seed-file")]
    files += [f"--log-file={munge / 'log'}", f"--socket={munge / 'socket'}"]
    daemons = []
    try:
        for words in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (root / f"{words[0]}.log").open("w") as log:
                daemons.append(subprocess.Popen(words, stdout=log, stderr=log))
            time.sleep(1)
        until(lambda: "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_an_array_of_workers_runs_a_sweep(place: Path, expected: list[Any]) -> None:
    words = ["sweep", "spec.toml", "--space", "space.toml", "--slurm", "--workers", "2", "--time", "10", "--json"]
    ended = subprocess.run([sys.executable, "-m", "lmworks", *words], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["workers"] == 2 and found["job"].isdigit()
    until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout)
    check("tiny", expected)
    logs = sorted(path.name for path in Sweep.open("sweeps/tiny").path.glob("slurm-*.log"))
    assert logs == [f"slurm-{found['job']}_{task}.log" for task in range(2)]


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_ladder_whose_trunk_and_branches_slurm_runs(place: Path, dataset: Path) -> None:
    """Its driver stays here, and lets branches begin on whichever machine is free."""
    Path("ladder.toml").write_text(
        'spec = "spec.toml"\nparams = [6e4]\ntokens = [1280, 2560]\nbatch_tokens = 64\nlr = 0.01\nschedule = "wsd"\n'
    )
    words = ["scaling", "run", "ladder.toml", "--slurm", "--workers", "2", "--time", "10", "--json"]
    ended = subprocess.run([sys.executable, "-m", "lmworks", *words], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    runs = json.loads(ended.stdout)["runs"]
    assert [(run["state"], run["parent"]) for run in runs] == [
        ("finished", None),
        ("finished", {"trial": 0, "step": runs[1]["parent"]["step"]}),
    ]
    assert not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout
