"""The run folder: created once, opened by everybody, held by one."""

import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import RunSpec, SpecError, load_run

SPEC = RunSpec.from_dict({"name": "first", "seed": 7, "optim": {"steps": 5, "warmup": 1}})


def test_spec_round_trip(tmp_path):
    folder = RunFolder.create(tmp_path / "a" / "b", SPEC)
    assert folder.spec() == SPEC
    assert load_run(folder.path) == SPEC
    assert [entry.name for entry in folder.path.iterdir()] == ["spec.toml"]
    assert RunFolder.open(folder.path) == folder


def test_existing_run_is_not_overwritten(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    with pytest.raises(SpecError, match=r"already holds a run; continue it with `lmworks resume .*run`.*--run-dir"):
        RunFolder.create(folder.path, SPEC.replace(seed=8))
    assert folder.spec().seed == 7


def test_folder_with_checkpoints_counts_as_run(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SpecError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", SPEC)


def test_invalid_run_folders(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(SpecError, match=r"cannot create the run folder .*file: a file of that name"):
        RunFolder.create(file, SPEC)
    with pytest.raises(SpecError, match=r"cannot create the run folder .*below: Not a directory"):
        RunFolder.create(file / "below", SPEC)
    with pytest.raises(SpecError, match=r"cannot create the run folder .*: File name too long"):
        RunFolder.create(tmp_path / ("x" * 300), SPEC)
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SpecError, match="Permission denied"):
        RunFolder.create(tmp_path / "run", SPEC)


def test_open_reports_missing_files(tmp_path):
    with pytest.raises(SpecError, match="is not a run folder: it does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"is not a run folder: it has no spec\.toml"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="is not a run folder: it is a file"):
        RunFolder.open(tmp_path / "file")


def test_events_are_lines_with_a_time(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    assert folder.events() == []
    folder.event("start", 0, attempt=0)
    folder.event("fault", 3, what="loss", value=float("inf"))
    first, second = [json.loads(line) for line in folder.events_path.read_text().splitlines()]
    assert folder.events() == [first, second]
    assert (first["kind"], first["step"], first["attempt"]) == ("start", 0, 0)
    assert (second["kind"], second["value"], second["nonfinite"]) == ("fault", None, {"value": "inf"})
    stamp = datetime.fromisoformat(first["time"])
    assert stamp.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=1)


def test_events_accept_any_value(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    folder.event("fault", 3, losses=[1.5, float("nan")], worst={"norm": float("-inf")}, text="ü\n")
    (event,) = folder.events()
    assert (event["losses"], event["worst"], event["text"]) == ([1.5, "nan"], {"norm": "-inf"}, "ü\n")
    assert folder.events_path.read_bytes().count(b"\n") == 1


def test_attempts_count_from_zero(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    assert folder.next_attempt() == 0
    folder.event("start", 0, attempt=0)
    assert folder.next_attempt() == 1
    with MetricsWriter(folder.metrics_path, 4) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert folder.next_attempt() == 5


def test_hung_attempt_is_counted(tmp_path):
    """Else the next one finds the old alarm, takes it for its own, and ends at once."""
    folder = RunFolder.create(tmp_path / "run", SPEC)
    folder.event("start", 0, attempt=0)
    (folder.path / "hangs" / "attempt-1").mkdir(parents=True)
    assert folder.next_attempt() == 2


def test_run_is_locked_by_one_process(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    assert not folder.is_locked()
    holder = "import sys; from lmworks.record import RunFolder\nwith RunFolder.open(sys.argv[1]).locked(): pass"
    with folder.locked():
        assert folder.is_locked()
        folder.event("start", 0)
        assert folder.is_locked()
        other = subprocess.run([sys.executable, "-c", holder, folder.path], capture_output=True, text=True)
        assert "run is in use: another process is training this run" in other.stderr
    assert not folder.is_locked()


def test_lock_file_names_owner_without_kernel_locks(tmp_path, monkeypatch):
    def unsupported(descriptor, kind):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    run, other = RunFolder(tmp_path), RunFolder(tmp_path)
    with run.locked():
        assert other.is_locked()
        with pytest.raises(SpecError, match=f"in use: process {os.getpid()} on .* no locks"), other.locked():
            pass
    assert not other.is_locked()
    child = os.fork()
    if not child:
        run.create_lock_file()
        os._exit(0)  # as if killed: the file stays
    os.waitpid(child, 0)
    assert run.lock_file.exists() and not run.is_locked()
    with run.locked():
        assert run.is_locked()
    assert not run.lock_file.exists()


def test_kernel_lock_leaves_lock_file_of_other_host(tmp_path):
    """Of a host that sees the same folder without locks."""
    folder = RunFolder.create(tmp_path / "run", SPEC)
    folder.lock_file.write_text("{}")
    with folder.locked():
        pass
    assert folder.lock_file.exists()


def test_locked_run_is_readable(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    mask = os.umask(0o002)
    try:
        with folder.locked(), MetricsWriter(folder.metrics_path, 0) as metrics:
            metrics.write(1, {"loss": 1.0})
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.events_path.stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.metrics_path.stat().st_mode) == 0o644


def test_kill_releases_lock(tmp_path):
    folder = RunFolder.create(tmp_path / "run", SPEC)
    holder = (
        "import sys, time; from lmworks.record import RunFolder\n"
        "with RunFolder.open(sys.argv[1]).locked(): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, folder.path], stdout=subprocess.PIPE)
    process.stdout.readline()
    assert folder.is_locked()
    process.kill()
    process.communicate()
    assert not folder.is_locked()


def test_recording_needs_no_torch():
    code = "import sys, lmworks.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
