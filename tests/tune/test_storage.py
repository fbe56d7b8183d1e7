"""Storages of a search: what is wrong with one is a line; two drivers and kills leave what one driver leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.spec.errors import LMWorksError, SpecError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Space
from lmworks.tune.storage import import_optuna, shown, storage_errors, storage_of
from lmworks.tune.suggest import Suggestions
from postgres import postgres_server

SPACE = Space.of({"optim.lr": {"range": [1e-4, 1e-1], "log": True}})
QUICK = ["optim.steps=27", "data.seq=32", "data.micro_batch=2", "log.eval_batches=2", "cluster.device=cpu"]


def suggestions(url: str, folder: Path, owner: str) -> Suggestions:
    folder.mkdir(exist_ok=True)
    return Suggestions("lr", SPACE, "random", 0, url, folder / "sampler.pickle", owner)


def test_two_sweeps_of_one_name_do_not_share_a_study(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tune.db"
    first = suggestions(url, tmp_path / "a", "one").ask()
    with pytest.raises(SpecError, match=r"sqlite.*tune.db has a study 'lr' of another sweep; choose another --name"):
        suggestions(url, tmp_path / "b", "two")
    again = suggestions(url, tmp_path / "a", "one")
    assert again.unused([]) == [first]


def test_a_search_keeps_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on without --storage would begin a second study of the same trials."""
    spec = str(Path("configs/tiny.toml").resolve())
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text("optim.lr.values = [1e-3, 1e-2]\n")
    monkeypatch.setattr("lmworks.cli.tune.run_driver", lambda *_: None)  # nothing is trained
    words = ["tune", spec, "--space", "space.toml", *QUICK]
    assert CliRunner().invoke(app, [*words, "--storage", "sqlite:///tune.db"]).exit_code == 0
    said = str(CliRunner().invoke(app, words).exception)
    assert 'is a sweep with other settings: storage is "sqlite:///tune.db", not left out' in said


def test_passwords_are_not_shown() -> None:
    assert shown("postgresql://me:secret@db:5432/tune") == "postgresql://me:***@db:5432/tune"
    assert shown("postgresql+psycopg://me@db/tune?sslmode=require") == "postgresql://me@db/tune?sslmode=require"


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SpecError) as error:
        storage_of("postgresql://me:secret@127.0.0.1/tune")
    said = 'psycopg is not installed: pip install "lmworks[postgres]"'
    assert str(error.value) == f"--storage postgresql://me:***@127.0.0.1/tune: {said}"


def test_a_database_that_breaks_in_the_middle_is_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tune.db"
    search = suggestions(url, tmp_path / "a", "one")
    search.ask()
    (tmp_path / "tune.db").write_bytes(b"no database" * 1000)
    said = r"^the storage sqlite.*tune.db failed: .*; the same command"
    with pytest.raises(LMWorksError, match=said) as error, storage_errors(url):
        search.ask()
    assert "\n" not in str(error.value)


def test_a_second_driver_waits_for_the_first(tmp_path: Path) -> None:
    sweep = Sweep.create(tmp_path / "sweep", {"name": "tiny"}, SPACE)
    driven = f"with Sweep.open({str(sweep.path)!r}).driving(): print(flush=True); time.sleep(600)"
    first = subprocess.Popen(
        [sys.executable, "-c", f"import time\nfrom lmworks.sweep.folder import Sweep\n{driven}"], stdout=subprocess.PIPE
    )
    try:
        assert first.stdout and first.stdout.readline()
        told: list[str] = []
        with sweep.driving(lambda why: (told.append(why), first.kill())):
            assert first.wait() == -signal.SIGKILL
        assert "driven by another process; this one goes on with it when that one ends" in told[0]
    finally:
        first.kill()
        first.wait()


# --- real trials, databases and kills --------------------------------------------------------------------


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    spec = str(Path("configs/tiny.toml").resolve())
    search = ["--space", "space.toml", "--workers", "1", "--trials", "6", "--min-steps", "3", "--json"]
    (folder / "space.toml").write_text("[optim.lr]\nrange = [1e-4, 1e-1]\nlog = true\n")
    command = [sys.executable, "-m", "lmworks", "tune", spec, *QUICK, *search, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One driver, a journal, nobody killed."""
    return end(start(tmp_path_factory.mktemp("journal")))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/tune.db"
    else:
        with postgres_server() as url:
            yield url


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
    return found


def owner(folder: Path) -> int | None:
    """The process that has a claim."""
    try:
        return json.loads((folder / "claim").read_text()).get("pid")
    except (OSError, ValueError):
        return None


@pytest.mark.slow
def test_two_drivers_and_two_kills_lose_and_repeat_nothing(
    tmp_path: Path, url: str, undisturbed: dict[str, Any]
) -> None:
    """Two drivers start at once, on a database without tables. A worker is killed in the middle of a trial, then the
    driver: the other one goes on."""
    drivers = [start(tmp_path, "--storage", url, "--name", "two") for _ in range(2)]
    trials = tmp_path / "sweeps/two/trials"

    def in_the_middle(number: int) -> int | None:
        steps = trials / f"{number:04d}/metrics.jsonl"
        return owner(steps.parent) if steps.exists() and steps.read_text() else None

    os.kill(until(lambda: in_the_middle(0)), signal.SIGKILL)
    until(lambda: in_the_middle(2))
    driving = owner(tmp_path / "sweeps/two/driver")
    killed, other = sorted(drivers, key=lambda driver: driver.pid != driving)
    assert killed.pid == driving
    killed.kill()
    killed.communicate()
    found = end(other)
    for key in ("trial", "overrides", "state", "step", "losses"):
        assert [trial[key] for trial in found["trials"]] == [trial[key] for trial in undisturbed["trials"]], key
    assert found["best"]["overrides"] == undisturbed["best"]["overrides"]
    check_study(url, found)


def check_study(url: str, found: dict[str, Any]) -> None:
    """One trial of Optuna's for each of ours, with its end."""
    optuna = import_optuna()
    study = optuna.load_study(study_name="two", storage=storage_of(url))
    kept = study.get_trials()
    assert [trial.params for trial in kept] == [trial["overrides"] for trial in found["trials"]]
    finished = [trial["loss"] if trial["state"] == "finished" else None for trial in found["trials"]]
    assert [trial.value if trial.state.name == "COMPLETE" else None for trial in kept] == finished
    assert study.best_value == found["best"]["loss"]


@pytest.mark.slow
def test_a_server_that_is_not_there_is_one_line() -> None:
    with postgres_server() as url:
        assert storage_of(url)
    with pytest.raises(SpecError, match=r"^--storage postgresql://lmworks@127.0.0.1.*onnection refused") as error:
        storage_of(url)
    assert "\n" not in str(error.value)
