"""Sinks: what was logged can be read back under the names of metrics.jsonl."""

import multiprocessing
import sys
import time
import types

import pytest

from lmworks.record import RunFolder
from lmworks.spec import RunSpec, SpecError
from lmworks.train.sinks import open_sinks


def make(tmp_path, **log):
    spec = RunSpec.from_dict({"name": "sinks", "log": log})
    return RunFolder.create(tmp_path / "run", spec), spec


def feed(folder, spec, steps, start=0):
    sinks = open_sinks(spec.log, folder, spec, start)
    for step, loss in steps:
        for sink in sinks:
            sink.log(step, {"step": step, "loss": loss, "tokens": 64, "mfu": None})
    for sink in sinks:
        sink.close()


def test_no_sinks_by_default(tmp_path):
    folder, spec = make(tmp_path)
    assert open_sinks(spec.log, folder, spec) == []
    assert [entry.name for entry in folder.path.iterdir()] == ["spec.toml"]


def test_tensorboard_reads_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, spec = make(tmp_path, tensorboard=True)
    feed(folder, spec, [(1, 5.5), (2, 5.0), (3, 4.5), (4, 4.0)])
    feed(folder, spec, [(3, 4.25), (4, 3.75)], start=2)  # resumed from step 2
    board = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["loss", "tokens"]
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(1, 5.5), (2, 5.0), (3, 4.25), (4, 3.75)]


@pytest.mark.parametrize(
    ("log", "module", "extra"),
    [
        ({"tensorboard": True}, "torch.utils.tensorboard", r"log\.tensorboard.*lmworks\[tensorboard\]"),
        ({"wandb": "offline"}, "wandb", r"log\.wandb.*lmworks\[wandb\]"),
    ],
)
def test_missing_package_names_extra(tmp_path, monkeypatch, log, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    folder, spec = make(tmp_path, **log)
    with pytest.raises(SpecError, match=extra):
        open_sinks(spec.log, folder, spec)


class FakeRun:
    def __init__(self, **options):
        self.options, self.logged, self.finished = options, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """What we ask of wandb, without its processes and its network."""
    module = types.ModuleType("wandb")
    module.runs = []
    module.Error = type("Error", (Exception,), {})
    module.Settings = dict
    module.init = lambda **options: module.runs.append(FakeRun(**options)) or module.runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_continues_the_same_run(tmp_path, wandb):
    folder, spec = make(tmp_path, wandb="online", project="mine")
    feed(folder, spec, [(1, 5.5)])
    feed(folder, spec, [(2, 5.0)], start=1)
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"]
    assert first.options["resume"] == "allow"
    assert (first.options["project"], first.options["name"], first.options["mode"]) == ("mine", "sinks", "online")
    assert first.options["dir"] == str(folder.path)
    assert first.options["config"] == spec.to_dict()
    assert first.logged == [(1, {"loss": 5.5, "tokens": 64})]
    assert second.logged == [(2, {"loss": 5.0, "tokens": 64})]
    assert second.finished


def test_two_runs_have_two_ids(tmp_path, wandb):
    for name in "ab":
        folder, spec = make(tmp_path / name, wandb="offline")
        feed(folder, spec, [])
    assert wandb.runs[0].options["id"] != wandb.runs[1].options["id"]


def test_wandb_login_failure_is_one_line_error(tmp_path, wandb):
    def refuse(**options):
        raise wandb.Error("No API key configured.\nUse `wandb login` to log in.")

    wandb.init = refuse
    folder, spec = make(tmp_path, wandb="online")
    with pytest.raises(SpecError, match=r"No API key configured. Use `wandb login` to log in; .*offline"):
        open_sinks(spec.log, folder, spec)


@pytest.mark.slow
def test_wandb_offline_for_real(tmp_path):
    pytest.importorskip("wandb")
    folder, spec = make(tmp_path, wandb="offline")
    # A process of its own: W&B leaves threads behind, and other tests fork this one.
    apart = multiprocessing.get_context("spawn").Process(target=feed, args=(folder, spec, [(1, 5.5), (2, 5.0)]))
    apart.start()
    apart.join()
    assert apart.exitcode == 0
    (log,) = folder.path.glob("wandb/offline-run-*/run-*.wandb")
    assert (folder.path / "wandb" / "id").read_text() in log.name
    deadline = time.monotonic() + 20  # a process of W&B's own writes it
    while b"tokens" not in (found := log.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"tokens" in found
