"""Checkpoints in a second place: whole or not at all there too, and enough to go on from on a new machine."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from lmworks import checkpoint
from lmworks.checkpoint.format import remote
from lmworks.checkpoint.format.folders import RetentionPolicy
from lmworks.checkpoint.format.remote import RemoteCopier
from lmworks.spec import CheckpointError, SpecError
from lmworks.train import Trainer
from tiny import curve, differences, events, flip_a_bit, make_spec, resume, saved, train
from variations import with_slow

ALL = RetentionPolicy()


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((30, 7), float(step))}}


def save(root: Path, *steps: int) -> Path:
    for step in steps:
        folder = checkpoint.save(root, step, state_of(step), {})
    return folder


def load(root: Path, url: str) -> tuple[int | None, list[str]]:
    state: dict[str, Any] = {"model": None}
    refused: list[str] = []
    found = checkpoint.load(root, state, refused=lambda folder, why: refused.append(why), remote=url)
    if found is not None:
        assert bool((state["model"]["w"] == found.step).all())
    return (found.step if found else None), refused


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/there/run" if request.param == "file" else "memory://run"
    fsspec.filesystem("memory").store.clear()


def test_a_new_machine_goes_on_from_the_newest_copy(tmp_path: Path, url: str) -> None:
    for step in (1, 2, 10):
        remote.upload(save(tmp_path / "here", step), url, ALL)
    assert remote.remote_steps(url) == [10, 2, 1]
    assert load(tmp_path / "new", url) == (10, [])
    assert [folder.name for folder in checkpoint.committed(tmp_path / "new")] == ["step-000010"]  # and it is here now
    checkpoint.verify(tmp_path / "new" / "step-000010")
    assert not list((tmp_path / "new").glob(".*"))
    assert load(tmp_path / "empty", url + "-other") == (None, [])


def test_what_is_here_comes_first(tmp_path: Path, url: str) -> None:
    remote.upload(save(tmp_path / "here", 5), url, ALL)
    shutil.rmtree(tmp_path / "here" / "step-000005")
    save(tmp_path / "here", 3)
    assert load(tmp_path / "here", url) == (3, [])
    for path in (tmp_path / "here" / "step-000003").glob("rank-*"):
        flip_a_bit(path)
    step, refused = load(tmp_path / "here", url)
    assert step == 5 and len(refused) == 1 and "step-000003/rank-00000.safetensors (rank 0) is damaged" in refused[0]


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "index.json", "manifest.json"])
def test_a_copy_that_is_damaged_is_refused_and_the_one_before_it_is_taken(tmp_path: Path, url: str, file: str) -> None:
    for step in (1, 2):
        remote.upload(save(tmp_path / "here", step), url, ALL)
    system, root = fsspec.core.url_to_fs(url)
    content = bytearray(system.cat_file(f"{root}/step-000002/{file}"))
    content[len(content) // 2] ^= 1
    system.pipe_file(f"{root}/step-000002/{file}", bytes(content))
    step, refused = load(tmp_path / "new", url)
    assert step == 1 and len(refused) == 1 and f"step-000002/{file}" in refused[0]


@pytest.mark.parametrize("name", ["../../../escaped", "{outside}/escaped", "sub/escaped", "..", "a\0b"])
def test_a_copy_that_names_files_elsewhere_writes_nothing_there(tmp_path: Path, url: str, name: str) -> None:
    """Its digests are right: whoever can write there can hash. Nothing is fetched, and the copy before is taken."""
    for step in (1, 2):
        remote.upload(save(tmp_path / "here", step), url, ALL)
    system, root = fsspec.core.url_to_fs(url)
    (tmp_path / "outside").mkdir()
    name, there = name.format(outside=tmp_path / "outside"), f"{root}/step-000002"
    fields = json.loads(system.cat_file(f"{there}/manifest.json"))
    fields["files"][name] = fields["files"]["rank-00000.safetensors"]
    system.pipe_file(f"{there}/manifest.json", json.dumps(fields).encode())
    marker = hashlib.sha256(system.cat_file(f"{there}/manifest.json")).hexdigest()
    system.pipe_file(f"{there}/COMMITTED", marker.encode())
    if name.startswith("../"):
        system.pipe_file(f"{there}/{name}", b"theirs")
    before = everything(tmp_path)
    new = tmp_path / "run" / "checkpoints"
    step, refused = load(new, url)
    assert step == 1 and len(refused) == 1 and f"step-000002/manifest.json names a file {name!r:.40}" in refused[0]
    assert {path for path in everything(tmp_path) - before if new not in path.parents} == {new, new.parent}
    assert {path.name for path in new.iterdir()} == {"step-000001"}


def everything(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_a_copy_without_its_marker_is_none(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copier that is killed leaves it: whatever it came to, the marker is last."""
    remote.upload(save(tmp_path / "here", 1), url, ALL)
    system, _ = fsspec.core.url_to_fs(url)
    names: list[str] = []
    put = type(system).put_file

    def dying(self: Any, source: str, target: str, **options: Any) -> None:
        names.append(Path(target).name)
        if names[-1] == "COMMITTED":
            raise KeyboardInterrupt
        put(self, source, target, **options)

    monkeypatch.setattr(type(system), "put_file", dying)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            remote.upload(save(tmp_path / "here", step), url, ALL)
    assert names[-2:] == ["manifest.json", "COMMITTED"]
    assert remote.remote_steps(url) == []  # step 1 was being replaced, and lost its marker before anything else
    assert load(tmp_path / "new", url) == (None, [])


def test_old_copies_are_removed_as_old_checkpoints_are(tmp_path: Path, url: str) -> None:
    for step in (10, 15, 20, 25, 30):
        remote.upload(save(tmp_path / "here", step), url, RetentionPolicy(newest=2, every=20))
    assert remote.remote_steps(url) == [30, 25, 20]


@pytest.mark.parametrize("keep", [0, 1])
def test_copies_of_a_line_that_a_rewind_gave_up_go(tmp_path: Path, url: str, keep: int) -> None:
    """Else a new machine would take them up, and the copy of the step gone back to would be the oldest."""
    for step in (10, 20, 30, 10):
        remote.upload(save(tmp_path / "here", step), url, RetentionPolicy(newest=keep))
    assert remote.remote_steps(url) == [10]


def test_a_new_run_refuses_the_place_of_another(dataset: Path, tmp_path: Path) -> None:
    """It would go on from the other's checkpoints, though it was never asked to."""
    remote.upload(save(tmp_path / "here", 5), f"file://{tmp_path}/there", ALL)
    spec = make_spec(dataset, f"checkpoint.remote=file://{tmp_path}/there")
    with pytest.raises(SpecError, match=r"checkpoint.remote = .*there' already holds .*newest of step 5"):
        Trainer(spec, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto the store")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "exists", refuse)
    with pytest.raises(CheckpointError, match=r"^checkpoint.remote = 'memory://run' cannot be read: .*no route$"):
        load(tmp_path, "memory://run")


def test_a_checkpoint_can_be_pruned_here_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "here", 1)
    system, _ = fsspec.core.url_to_fs(f"file://{tmp_path}")
    put = type(system).put_file

    def pruned(self: Any, source: str, target: str, **options: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        put(self, source, target, **options)

    monkeypatch.setattr(type(system), "put_file", pruned)
    remote.upload(folder, f"file://{tmp_path}/there", ALL)
    assert not list((tmp_path / "here").iterdir())
    assert load(tmp_path / "new", f"file://{tmp_path}/there") == (1, [])


def test_copies_are_made_by_a_process_and_the_newest_waits(tmp_path: Path) -> None:
    copies = RemoteCopier(f"file://{tmp_path}/there", ALL)
    for step in (1, 2, 3):  # before the first has ended: 3 takes the place of 2
        copies.add(save(tmp_path / "here", step))
    assert copies.writer is not None and copies.writer.process.pid
    first = None
    while first is None:
        first = copies.poll(0.01)
    assert (first.folder.name, first.error) == ("step-000001", "")
    (last,) = copies.drain()
    assert (last.folder.name, last.error) == ("step-000003", "")
    copies.close()
    assert remote.remote_steps(f"file://{tmp_path}/there") == [3, 1]


@pytest.mark.parametrize(
    ("address", "said"),
    [("nowhere://x", "Protocol not known: nowhere"), ("s3://bucket/run", "s3fs")],
)
def test_an_address_that_cannot_be_opened_is_named(tmp_path: Path, address: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint.remote = '{address}'.*{said}") as caught:
        remote.remote_steps(address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asynchronous", with_slow(["true", "false"], ["false"]))
def test_a_run_whose_machine_is_lost_goes_on_elsewhere_bitwise(
    dataset: Path, tmp_path: Path, asynchronous: str
) -> None:
    spec = make_spec(dataset, "optim.steps=6", "checkpoint.every=2", f"checkpoint.asynchronous={asynchronous}")
    train(spec, tmp_path / "straight")
    there = spec.replace(checkpoint=spec.checkpoint.replace(remote=f"file://{tmp_path}/there"))
    train(there, tmp_path / "run")
    assert [event["step"] for event in events(tmp_path / "run", "copy")][-1] == 6
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # all that the machine had, but for what a new one is given
    shutil.rmtree(tmp_path / "there" / "step-000006")
    resume(tmp_path / "run")
    assert differences(saved(tmp_path / "run"), saved(tmp_path / "straight")) == []
    assert curve(tmp_path / "run")[-1] == curve(tmp_path / "straight")[-1]


def test_a_copy_that_fails_is_told_and_the_run_goes_on(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = make_spec(dataset, "optim.steps=2", "checkpoint.every=1", f"checkpoint.remote=file://{tmp_path}/file/there")
    Trainer(spec, tmp_path / "run", quiet=True).run()
    assert [event["step"] for event in events(tmp_path / "run", "save")] == [1, 2]
    failed = events(tmp_path / "run", "copy_failed")
    assert failed and all("file" in event["error"] for event in failed)
    assert len(checkpoint.committed(tmp_path / "run" / "checkpoints")) == 2
