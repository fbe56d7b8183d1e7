"""Ray drivers: Python that reads back the spec it was made from, and (make test-ray) trains on two workers, or on two
trainer actors and a rollout actor."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lmworks.cli.main import main
from lmworks.launch import Job, ray_driver
from lmworks.spec import RunSpec, SpecError, load_run


def two_workers(run_dir: str = "/shared/runs/tiny", *overrides: str, name: str = "tiny") -> Job:
    spec = load_run("tiny", ["parallel.dp=2", "cluster.device=cpu", *overrides]).replace(name=name)
    return Job.of(spec, "tiny", nodes=2, run_dir=run_dir)


def constants(source: str) -> dict[str, Any]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


@pytest.mark.parametrize("name", ["tiny", 'a "quoted" """name"""', "tab\tand ü"])
def test_the_driver_holds_the_spec(name: str) -> None:
    job = two_workers(name=name)
    found = constants(ray_driver(job, "/shared/ray"))
    assert RunSpec.from_dict(tomllib.loads(found["SPEC"])).to_dict() == job.spec.to_dict()
    assert found["RUN"] == "/shared/runs/tiny"


def test_it_asks_ray_for_the_ranks_of_the_layout() -> None:
    source = ray_driver(two_workers(), "/shared/ray")
    assert "num_workers=2" in source
    assert "use_gpu=False" in source
    assert "resources_per_worker={'CPU': 1}," in source
    gpus = Job.of(load_run("tiny", ["parallel.dp=4", "parallel.tp=2"]), "tiny", nodes=8, per_node=1, run_dir="/r")
    source = ray_driver(gpus, "/shared/ray")
    assert "num_workers=8" in source
    assert "use_gpu=True" in source
    assert "resources_per_worker={'CPU': 1, 'GPU': 1}" in source


def test_a_relative_run_folder_is_refused() -> None:
    with pytest.raises(SpecError, match="--run-dir 'runs/tiny' must be absolute"):
        ray_driver(two_workers("runs/tiny"), "/shared/ray")


@pytest.mark.parametrize("given", [[], ["--workers", "2"]])
def test_the_command_makes_the_folder_of_its_driver(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "driver.py"
    monkeypatch.setattr(sys, "argv", ["lmworks", "launch", "ray", "tiny", "parallel.dp=2", *given, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "num_workers=2" in out.read_text()


def test_workers_are_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lmworks", "launch", "ray", "tiny", "parallel.dp=2", "--workers", "3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--workers 3: the layout has 2 ranks" in capsys.readouterr().err


def rollout_job(folder: Path, *overrides: str) -> Job:
    """Two ranks that train and one that samples."""
    from post_training import make_spec

    layout = ["parallel.dp=2", "parallel.strategy=fsdp2", "align.rollout_ranks=1", "cluster.device=cpu"]
    spec = make_spec(folder, "grpo", *layout, "log.eval_every=0", *overrides)
    return Job.of(spec, "grpo", nodes=3, per_node=1, run_dir=str(folder / "run"))


def test_rollout_ranks_are_actors_of_their_own(tmp_path: Path) -> None:
    job = rollout_job(tmp_path)
    source = ray_driver(job, "/shared/ray")
    found = constants(source)
    assert RunSpec.from_dict(tomllib.loads(str(found["SPEC"]))).to_dict() == job.spec.to_dict()
    assert (found["RANKS"], found["RESOURCES"]) == (3, {"CPU": 1})
    compile(source, "driver.py", "exec")


@pytest.mark.ray
def test_three_ray_actors_train_as_forked_ranks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from lmworks.align.post_trainer import trainer_class
    from lmworks.parallel.local_ranks import on_ranks
    from tiny import differences, events, saved

    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = rollout_job(tmp_path, "optim.steps=6")
    driver = tmp_path / "driver.py"
    driver.write_text(ray_driver(job, ""))
    start = f"import ray, runpy; ray.init(num_cpus=3); runpy.run_path({str(driver)!r}, run_name='__main__')"
    for _ in range(2):  # the second finds the run and has nothing left to do
        result = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        assert "lmworks report" in result.stdout
    assert len(events(tmp_path / "run", "finish")) == 1

    def work(_rank: int) -> None:
        trainer_class(job.spec)(job.spec, tmp_path / "forked", quiet=True).run()

    on_ranks(3, work, group=False)
    assert not differences(saved(tmp_path / "run", 6), saved(tmp_path / "forked", 6))


@pytest.mark.ray
def test_two_ray_workers_train_and_resume(dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tiny import curve, events, make_spec

    steps = make_spec(dataset).optim.steps
    overrides = ["parallel.dp=2", "cluster.device=cpu", "log.eval_every=0"]
    job = Job.of(make_spec(dataset, *overrides), "tiny", nodes=2, per_node=1, run_dir=str(tmp_path / "run"))
    driver = tmp_path / "driver.py"
    driver.write_text(ray_driver(job, str(tmp_path / "ray")))
    for _ in range(2):  # the second finds the run and has nothing left to do
        result = subprocess.run([sys.executable, driver], capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        assert "lmworks report" in result.stdout
    assert len(curve(tmp_path / "run")) == steps
    assert len(events(tmp_path / "run", "start")) == 1
    assert len(events(tmp_path / "run", "finish")) == 1
