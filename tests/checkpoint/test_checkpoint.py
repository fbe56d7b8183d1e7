"""Checkpoints survive kill -9, full disks and flipped bits, or say which file is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from lmworks import checkpoint
from lmworks.checkpoint.format import manifest
from lmworks.spec import CheckpointError, RunSpec
from lmworks.train import Trainer
from variations import with_slow

NEVER: Callable[[Path, str], None] = lambda folder, reason: pytest.fail(f"refused {folder}: {reason}")  # noqa: E731


def state_of(step: int, size: int = 64) -> dict[str, Any]:
    """Everything a checkpoint may hold; the numbers say which step they belong to."""
    noise = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return {
        "model": {"embed.weight": noise, "half": noise.bfloat16(), "count": torch.tensor(step)},
        "optim": {"state.embed.weight.exp_avg": noise * 1e-30, "empty": torch.empty(0, 3)},
        "progress": {"seen": {"tokens": torch.tensor([step, 2]), "bits": torch.tensor([step % 2 == 0])}},
    }


def blank() -> dict[str, Any]:
    return {"model": None, "optim": None, "progress": None}


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, dtype and structure included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def save(root: Path, *steps: int, keep: int = 0) -> Path:
    folder = root
    for step in steps:
        folder = checkpoint.save(root, step, state_of(step), {"step": step, "lr": 0.1 + 0.2}, keep)
    return folder


def load(root: Path) -> tuple[int | None, list[str]]:
    """The step that a resume would start from, having compared all its content, and what was refused."""
    refused: list[str] = []
    state = blank()
    found = checkpoint.load(root, state, refused=lambda folder, reason: refused.append(f"{folder.name}: {reason}"))
    if found is None:
        return None, refused
    assert same(state, state_of(found.step))
    return found.step, refused


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# --- what is saved comes back -----------------------------------------------------------------------


def test_round_trip_is_exact(tmp_path: Path) -> None:
    folder = save(tmp_path / "run" / "checkpoints", 100)
    assert folder.name == "step-000100"
    state = blank()
    found = checkpoint.load(folder.parent, state, refused=NEVER)
    assert found is not None and found.meta == {"step": 100, "lr": 0.1 + 0.2}
    assert same(state, state_of(100))


def test_tensors_are_filled_in_place_and_sections_can_be_left_out(tmp_path: Path) -> None:
    save(tmp_path, 7)
    weights = torch.zeros(64, 8)
    state = {"model": {"embed.weight": weights, "half": torch.zeros(64, 8), "count": torch.tensor(0)}}
    checkpoint.load(tmp_path, state, refused=NEVER)
    assert same(weights, state_of(7)["model"]["embed.weight"])
    assert state["model"]["half"].dtype == torch.float32  # into another precision, if the reader wants that


def test_a_fresh_process_reads_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    script = (
        "import sys, torch; from pathlib import Path; from lmworks import checkpoint\n"
        "state = {'model': None}; m = checkpoint.load(Path(sys.argv[1]), state, refused=print)\n"
        "print(m.step, state['model']['embed.weight'].double().sum().item().hex())"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    expected = state_of(3)["model"]["embed.weight"].double().sum().item()
    assert result.stdout.split() == ["3", expected.hex()], result.stdout
    assert result.stderr == ""  # no warning about process groups reaches the user
    assert [entry["bytes"] for entry in checkpoint.verify(folder).files.values()] == [
        (folder / name).stat().st_size for name in checkpoint.verify(folder).files
    ]


@pytest.mark.parametrize("hash", [pytest.param("sha256", marks=pytest.mark.slow), "xxh3"])
def test_files_of_several_chunks(tmp_path: Path, hash: str) -> None:
    """Tensors that end inside a chunk, fill it, span three; read whole, in another precision, and weights alone."""
    mib = 2**20
    sizes = {"a": 3 * mib + 1, "b": 16 * mib, "c": 37 * mib + 5, "d": 7}
    state = {
        "model": {name: torch.randint(256, (size,), dtype=torch.uint8) for name, size in sizes.items()},
        "optim": {"m": torch.arange(5 * mib, dtype=torch.float32)},
    }
    folder = checkpoint.save(tmp_path, 1, state, {}, hash=hash)
    (entry,) = [entry for name, entry in checkpoint.verify(folder).files.items() if name == SHARD]
    assert len(entry["digests"]) == 5 and entry["bytes"] > 76 * mib
    found: dict[str, Any] = {"model": None, "optim": {"m": torch.zeros(5 * mib, dtype=torch.float64)}}
    checkpoint.load(tmp_path, found, refused=NEVER)
    assert same(found["model"], state["model"]) and torch.equal(found["optim"]["m"], state["optim"]["m"].double())
    weights: dict[str, Any] = {"model": None}
    checkpoint.load(tmp_path, weights, refused=NEVER)
    assert same(weights["model"], state["model"])
    last = (folder / SHARD).read_bytes()[4 * manifest.CHUNK :]
    made = hashlib.sha256 if hash == "sha256" else xxhash.xxh3_128
    assert entry["digests"][4] == made(last).hexdigest()
    with (folder / SHARD).open("r+b") as file:
        file.seek(-16 * mib, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-16 * mib, os.SEEK_END)
        file.write(bytes([byte ^ 128]))
    with pytest.raises(CheckpointError, match=rf"{SHARD} \(rank 0\) is damaged: .* bytes {48 * mib} to {64 * mib}"):
        checkpoint.load(tmp_path, {"model": None}, refused=lambda folder, why: None)


def test_xxhash_that_is_not_there_is_said_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a checkpoint that cannot be checked is not a damaged one: no older one stands in for it."""
    checkpoint.save(tmp_path / "saved", 1, state_of(1), {})
    checkpoint.save(tmp_path / "saved", 2, state_of(2), {}, hash="xxh3")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(CheckpointError, match=r'"xxh3" need the package xxhash.*pip install "lmworks\[xxhash\]"'):
        checkpoint.load(tmp_path / "saved", {"model": None}, refused=NEVER)
    spec = RunSpec.from_dict({"checkpoint": {"hash": "xxh3"}})
    with pytest.raises(CheckpointError, match="xxhash"):
        Trainer(spec, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_files_can_be_read_without_us(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = save(tmp_path, 1)
    with safe_open(folder / SHARD, "pt") as file:
        assert same(file.get_tensor("model.half"), state_of(1)["model"]["half"])
        assert same(
            file.get_tensor("optim.state.embed.weight.exp_avg"), state_of(1)["optim"]["state.embed.weight.exp_avg"]
        )
        assert len(file.keys()) == 7


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, [])
    assert load(tmp_path / "not there") == (None, [])


def test_a_step_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    found = checkpoint.load(tmp_path, blank(), step=1, refused=NEVER)
    assert found is not None and found.step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; steps there: 2, 1"):
        checkpoint.load(tmp_path, blank(), step=3, refused=NEVER)


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    second = {**state_of(2), "model": {"other": torch.ones(3)}}
    checkpoint.save(tmp_path, 2, second, {})
    state = blank()
    found = checkpoint.load(tmp_path, state, refused=NEVER)
    assert found is not None and same(state, second)
    assert names(tmp_path) == ["step-000001", "step-000002"]


# --- a state that does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"embed.weight": torch.zeros(32, 8)}, r"model.embed.weight is \(64, 8\) there, but \(32, 8\) in this run"),
        ({"head.weight": torch.zeros(2)}, "does not have model.head.weight, which this run has"),
        ({"half": None}, "has model.half, which this run does not have"),
        ({"count": 3}, r"model.count is \(\) there, but a plain value in this run"),
    ],
)
def test_a_mismatch_names_the_parameter_and_touches_nothing(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    save(tmp_path, 1)
    untouched = torch.zeros(64, 8)
    wanted = {"embed.weight": untouched, "half": torch.zeros(64, 8), "count": torch.tensor(0), **model}
    state = {"model": {name: value for name, value in wanted.items() if value is not None}}
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(tmp_path, state, refused=NEVER)
    assert "\n" not in str(caught.value) and "step-000001" in str(caught.value)
    assert not untouched.any()


# --- damage is refused by name, and the previous checkpoint is used ---------------------------------


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SHARD = manifest.shard_name(0)
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a flipped bit": (lambda new, old: flip_a_bit(new / SHARD), f"{SHARD} (rank 0) is damaged"),
    "a flipped bit in the index": (lambda new, old: flip_a_bit(new / "index.json"), "index.json (rank 0) is damaged"),
    "a truncated shard": (lambda new, old: os.truncate(new / SHARD, 100), f"{SHARD} (rank 0) has 100 bytes instead of"),
    "a missing shard": (lambda new, old: (new / SHARD).unlink(), f"{SHARD} (rank 0) is missing"),
    "a shard of another step": (lambda new, old: shutil.copy(old / SHARD, new / SHARD), f"{SHARD} "),
    "a missing manifest": (lambda new, old: (new / "manifest.json").unlink(), "manifest.json is missing"),
    "another step's manifest": (
        lambda new, old: shutil.copy(old / "manifest.json", new / "manifest.json"),
        "manifest.json does not match COMMITTED",
    ),
    "a missing marker": (lambda new, old: (new / "COMMITTED").unlink(), "COMMITTED is missing"),
    "an empty marker": (lambda new, old: (new / "COMMITTED").write_text(""), "manifest.json does not match"),
    "a stale marker": (lambda new, old: shutil.copy(old / "COMMITTED", new / "COMMITTED"), "does not match COMMITTED"),
    "another step's folder": (
        lambda new, old: (shutil.rmtree(new), shutil.copytree(old, new)),
        "manifest.json belongs to step 1, not to step-000002",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(tmp_path: Path, kind: str) -> None:
    old = save(tmp_path, 1)
    new = save(tmp_path, 2)
    damage, message = DAMAGE[kind]
    damage(new, old)
    step, refused = load(tmp_path)
    assert step == 1
    assert len(refused) == 1 and str(new) in refused[0] and message in refused[0] and "\n" not in refused[0]
    with pytest.raises(CheckpointError, match="step-000002"):
        checkpoint.load(tmp_path, blank(), step=2, refused=lambda folder, reason: None)


def test_every_bit_of_every_file_counts(tmp_path: Path) -> None:
    """A flip anywhere: in the shard, the index, the manifest, the marker."""
    folder = save(tmp_path, 1)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for position in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match=path.name):
                checkpoint.verify(folder)
        path.write_bytes(whole)
    assert checkpoint.verify(folder).step == 1


def test_all_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step) / SHARD)
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*step-000002.*step-000001"):
        load(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**fields, "format": 99}))
    manifest.commit(folder)
    with pytest.raises(CheckpointError, match="has format 99; this version of LMWorks reads 2"):
        checkpoint.verify(folder)


def test_a_stray_file_harms_nobody(tmp_path: Path) -> None:
    (save(tmp_path, 1) / ".nfs0001").write_text("x")
    assert load(tmp_path) == (1, [])


# --- retention --------------------------------------------------------------------------------------


def test_keep_newest(tmp_path: Path) -> None:
    save(tmp_path, 8, 9, 10, 11, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000011"]


def test_keep_every_so_many_for_ever(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20, 25, 30):
        checkpoint.save(tmp_path, step, state_of(step), {}, checkpoint.RetentionPolicy(newest=2, every=10))
    assert names(tmp_path) == [f"step-0000{step}" for step in (10, 20, 25, 30)]
    checkpoint.prune(tmp_path, checkpoint.RetentionPolicy(newest=1, every=20))
    assert names(tmp_path) == ["step-000020", "step-000030"]


def test_the_last_good_one_is_never_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3, 4):
        flip_a_bit(save(tmp_path, step) / SHARD)
    checkpoint.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-000001", "step-000003", "step-000004"]
    assert load(tmp_path)[0] == 1


def test_what_was_just_saved_is_kept_though_others_are_newer(tmp_path: Path) -> None:
    save(tmp_path, 5, 6)  # of a future that a resume from an earlier step has given up
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-000002", "step-000006"]


def test_leftovers_are_swept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f".step-000002.tmp-{gone.pid}-0", f".step-000002.tmp-{os.getppid()}-0", "step-000002", "step-000009"):
        (tmp_path / name).mkdir()
    save(tmp_path, 3)
    # A living process may still be writing; an unfinished folder that is newer than all may still be looked at.
    assert names(tmp_path) == [f".step-000002.tmp-{os.getppid()}-0", "step-000001", "step-000003", "step-000009"]


# --- a process killed at any point loses nothing ----------------------------------------------------


@pytest.fixture
def may_fork(request: pytest.FixtureRequest) -> None:
    """CUDA does not survive a fork: where it is there, the test runs in a process that cannot see it."""
    if torch.cuda.is_available():
        again = [sys.executable, "-m", "pytest", f"{request.path}::{request.node.name}"]
        result = subprocess.run(again, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
        pytest.skip("passed in a process without CUDA")


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(0)


def killed(pid: int) -> bool:
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("before", with_slow((2, 3), (3,)), ids=["a new step", "one that exists"])
def test_killed_at_every_system_call_that_matters(before: int, tmp_path: Path, may_fork: None) -> None:
    """kill -9 at the first, second, … sync, rename or unlink of a save."""
    for point in range(1000):
        root = tmp_path / f"{before}-{point}"
        save(root, *range(1, before + 1))

        def die_at_point(root: Path = root, point: int = point) -> None:
            calls = 0

            def dying(call: Callable[..., Any]) -> Callable[..., Any]:
                def wrapper(*args: Any, **options: Any) -> Any:
                    nonlocal calls
                    if calls == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
                    return call(*args, **options)

                return wrapper

            for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
                setattr(os, name, dying(getattr(os, name)))
            save(root, 3, keep=2)

        died = killed(fork(die_at_point))
        for folder in checkpoint.committed(root):
            checkpoint.verify(folder)
        step, refused = load(root)
        assert step in (before, 3), point
        assert all("COMMITTED is missing" in reason for reason in refused), refused
        save(root, 4, keep=2)  # the next save works, and sweeps
        assert names(root)[-1] == "step-000004" and len(names(root)) == 2, names(root)
        if not died:
            assert step == 3
            break
        shutil.rmtree(root)
    assert point > 8, "the faults were never injected"


def test_killed_at_random(tmp_path: Path, may_fork: None) -> None:
    """A loop of saves, killed again and again by another process, goes on where it stood."""
    last = 0
    for round in range(11):
        ready, tell = os.pipe()

        def save_forever(tell: int = tell) -> None:
            step = load(tmp_path)[0] or 0
            while True:
                step += 1
                save(tmp_path, step, keep=3)
                os.write(tell, b"x")

        pid = fork(save_forever)
        os.read(ready, 1)  # it has saved once
        time.sleep(0.01 + 0.007 * (round * 7 % 11))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        os.close(ready)
        os.close(tell)
        for folder in checkpoint.committed(tmp_path):
            checkpoint.verify(folder)
        step, _ = load(tmp_path)
        assert (step or 0) > last
        last = step or 0
    save(tmp_path, last + 1, keep=3)
    assert len(names(tmp_path)) == 3


# --- the disk says no -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 300, 5_000, 60_000])
def test_a_full_disk(tmp_path: Path, may_fork: None, limit: int) -> None:
    """A real limit of the system on the size of a file: the error arises where a full disk's would."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    ready, tell = os.pipe()  # which has no size limit

    def save_with_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            checkpoint.save(tmp_path, 2, state_of(2, size=4000), {})
        except CheckpointError as error:
            os.write(tell, str(error).encode())

    assert not killed(fork(save_with_limit))
    os.close(tell)
    message = os.read(ready, 10_000).decode()
    os.close(ready)
    assert message == f"cannot save {tmp_path / 'step-000002'}: File too large"
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert load(tmp_path) == (2, [])


@pytest.mark.parametrize("failing", range(1, 8))
@pytest.mark.parametrize("existing", [1, 2])
def test_an_error_at_any_sync_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, existing: int
) -> None:
    save(tmp_path, existing)
    calls = 0
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-000002: No space left on device"):
        save(tmp_path, 2)
    assert names(tmp_path) == [f"step-00000{existing}"]
    assert load(tmp_path) == (existing, [])


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save .*step-000001: Not a directory") as caught:
        save(tmp_path / "file" / "checkpoints", 1)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot save .*: Permission denied"):
        save(tmp_path / "checkpoints", 1)


def test_ctrl_c_during_a_save_is_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    monkeypatch.setattr(os, "fsync", lambda descriptor: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    signal.signal(signal.SIGINT, before)
    assert names(tmp_path) == ["step-000001"]
