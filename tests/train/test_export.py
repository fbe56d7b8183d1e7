"""An export is streamed: whatever it is cut into, no more than one stored tensor is held; it is whole or not there."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lmworks import checkpoint
from lmworks.model import GPT
from lmworks.model.hf_layout import layout
from lmworks.model.hf_write import write_hf
from lmworks.record import RunFolder
from lmworks.spec import CheckpointError, ModelSpec, SpecError
from lmworks.train.export import MARKER, export
from tiny import flip_a_bit, make_spec

SHAPE = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1}
GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 2}  # fused, transposed
MIXTRAL = {"experts": 4, "top_k": 2, "expert_ffn": 32}  # one weight of ours, four tensors of theirs


def save_run(folder: Path, data: Path, *steps: int, overrides: tuple[str, ...] = ()) -> RunFolder:
    """A run whose weights are those of the seed `step`."""
    spec = make_spec(data, *overrides)
    run = RunFolder.create(folder, spec)
    for step in steps:
        state = {"model": GPT(spec.model, seed=step).state_dict()}
        checkpoint.save(run.checkpoints, step, state, {"spec": spec.to_dict(), "cursor": step})
    return run


def weights(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return found


def shard(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:06d}" / "rank-00000.safetensors"


# --- what is held -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, GPT2, MIXTRAL], ids=["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("limit", [10**9, 20_000, 1], ids=["one file", "shards", "a file a tensor"])
def test_weights_are_read_once_and_freed(tmp_path: Path, change: dict[str, object], limit: int) -> None:
    model = GPT(ModelSpec.from_preset("tiny", **{**SHAPE, **change}), seed=1)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    reads: list[str] = []
    held: list[weakref.ref[Tensor]] = []
    most = 0

    def read(name: str) -> Tensor:
        nonlocal most
        reads.append(name)
        value = parameters[name].detach().clone()
        held.append(weakref.ref(value))
        most = max(most, sum(one.nbytes for ref in held if (one := ref()) is not None))
        return value

    gc.disable()  # what is let go is let go by reference counts, at once
    try:
        written = write_hf(model.spec, parameters, read, tmp_path, shard_bytes=limit)
    finally:
        gc.enable()
    assert sorted(reads) == sorted(parameters)
    family = "gpt2" if change is GPT2 else "mixtral" if change is MIXTRAL else "llama"
    stored = list(layout(model.spec, family))
    assert most <= max(sum(parameters[part].nbytes for part in one.parts) for one in stored)
    assert len(written) == {10**9: 1, 1: len(stored)}.get(limit, len(written)) and (limit != 20_000 or len(written) > 2)
    found = weights(tmp_path)
    assert found.keys() == {one.name for one in stored}
    assert all(torch.equal(found[one.name], one.gather(parameters)) for one in stored)
    again = GPT.from_hf(tmp_path)
    assert all(torch.equal(value, parameters[name]) for name, value in again.named_parameters())


MEASURE = """
import sys, torch
from pathlib import Path
from lmworks.train.device import PeakMemory
from lmworks.train.export import export
small, large, out = map(Path, sys.argv[1:])
export(small, out / "small")  # everything is imported
memory = PeakMemory(torch.device("cpu"))
written = export(large, out / "large", shard_bytes=32 * 10**6)
print(memory.read(), written.params * 4, len(written.files))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked for the peak")
def test_peak_memory_is_below_model_size(dataset: Path, tmp_path: Path) -> None:
    """In a process of its own. Verifying takes four chunks of 16 MiB at a time, which is what there is to see."""
    wide = ("model.layers=32", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.ffn=2048")
    save_run(tmp_path / "small", dataset, 1)
    save_run(tmp_path / "large", dataset, 1, overrides=wide)
    arguments = [tmp_path / "small", tmp_path / "large", tmp_path / "out"]
    result = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peak, model, files = map(int, result.stdout.split())
    assert model > 500e6 and files > 12
    assert peak < 0.3 * model, f"{peak / 1e6:.0f} MB were held to export {model / 1e6:.0f} MB"


# --- whole or not there -----------------------------------------------------------------------------------


def test_failed_export_keeps_earlier_export(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses the first, second, … sync: what lies there is the old export, or at the very end the new one."""
    run, out, real = save_run(tmp_path / "run", dataset, 1, 2), tmp_path / "out", os.fsync
    whole = {step: GPT(make_spec(dataset).model, seed=step).embed.weight for step in (1, 2)}
    old = new = 0
    for failing in range(1, 100):
        export(run.path, out, 1, shard_bytes=40_000)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        calls = 0

        def full(descriptor: int, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(28, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        try:
            export(run.path, out, 2, shard_bytes=40_000)
            break
        except CheckpointError as error:
            assert "No space left on device" in str(error) and str(out) in str(error)
        finally:
            monkeypatch.setattr(os, "fsync", real)
        assert not list(out.glob("*.part"))
        if {path.name: path.read_bytes() for path in out.iterdir()} == before:
            old += 1
            continue
        new += 1
        assert torch.equal(GPT.from_hf(out).embed.weight, whole[2])
    assert old > 5 and 0 < new < 5
    assert json.loads((out / MARKER).read_text())["step"] == 2
    export(run.path, out, 1)  # into one file: nothing of the many is left
    assert sorted(path.name for path in out.iterdir()) == ["config.json", MARKER, "model.safetensors"]
    assert torch.equal(weights(out)["model.embed_tokens.weight"], whole[1])


def test_leftovers_of_killed_export_are_removed(dataset: Path, tmp_path: Path) -> None:
    run, out = save_run(tmp_path / "run", dataset, 1), tmp_path / "out"
    out.mkdir()
    for name in (MARKER, "model-00007-of-00009.safetensors.part", "model-00001-of-00009.safetensors", "notes.txt"):
        (out / name).write_text("x")
    export(run.path, out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", MARKER, "model.safetensors", "notes.txt"]


def test_damaged_checkpoint_falls_back_to_previous(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", dataset, 1, 2)
    flip_a_bit(shard(run, 2))
    assert export(run.path, tmp_path / "out").step == 1
    said = capsys.readouterr().err
    assert "step-000002" in said and f"{shard(run, 2).name} (rank 0) is damaged" in said
    assert torch.equal(
        weights(tmp_path / "out")["model.embed_tokens.weight"], GPT(make_spec(dataset).model, seed=1).embed.weight
    )
    with pytest.raises(CheckpointError, match="rank-00000"):
        export(run.path, tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


def test_export_from_checkpoint_folder_only(dataset: Path, tmp_path: Path) -> None:
    """A folder of them, or one, copied away from the run."""
    run = save_run(tmp_path / "run", dataset, 1, 2)
    run.checkpoints.rename(tmp_path / "copied")
    assert export(tmp_path / "copied", tmp_path / "a").step == 2
    assert export(tmp_path / "copied" / "step-000001", tmp_path / "b").step == 1
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        export(run.path, tmp_path / "c")


def test_mismatched_spec_is_rejected(dataset: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", dataset, 1)
    text = run.spec_path.read_text()
    for old, new, said in (
        ("layers = 1", "layers = 2", "does not have model.blocks.1"),
        ("hidden = 32", "hidden = 64", r"is \(\d+, 32\) there, but \(\d+, 64\) in the run's model"),
    ):
        assert old in text
        run.spec_path.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match=said):
            export(run.path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_output_is_reported(dataset: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", dataset, 1)
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises((CheckpointError, SpecError), match=r"locked.*: Permission denied"):
        export(run.path, tmp_path / "locked" / "out")
