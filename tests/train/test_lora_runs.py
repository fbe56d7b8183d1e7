"""Runs with adapters: small checkpoints, bitwise resume, a base that must stay what it was, export, merge, PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from layouts import Job, do, layout
from lmworks.model import GPT
from lmworks.record import RunFolder
from lmworks.spec import RunSpec, SpecError
from lmworks.train import Trainer
from lmworks.train.export import export
from lmworks.train.load_run import load_trained
from tiny import Crash, before_step, crash, curve, differences, make_spec, resume, saved, train
from typed import lmworks

LORA = ("lora.rank=3", "optim.steps=6", "checkpoint.every=2", "checkpoint.keep=0")
TOKENS = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def base(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained run."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(make_spec(dataset, "optim.steps=10"), folder)
    return folder


@pytest.fixture(scope="module")
def hf(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "base"
    export(base, folder)
    return folder


def lora(dataset: Path, base: Path, *overrides: str) -> RunSpec:
    return make_spec(dataset, *LORA, f"checkpoint.init={base}", *overrides)


@pytest.mark.parametrize(
    "options",
    [(), ("lora.dora=true", 'lora.targets=["attention"]'), ("lora.base=nf4", "lora.dora=true")],
    ids=["lora", "dora", "qlora"],
)
def test_a_checkpoint_holds_what_is_trained_and_resumes_bitwise(
    base: Path, dataset: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    spec = lora(dataset, base, *options)
    train(spec, tmp_path / "whole")
    state = saved(tmp_path / "whole")
    assert all(".adapters.default." in name for name in state if name.startswith(("model.", "optim.")))
    broken = Trainer(spec, tmp_path / "broken", quiet=True)
    before_step(broken, 4, crash)
    with pytest.raises(Crash):
        broken.run()
    resume(tmp_path / "broken")
    assert differences(state, saved(tmp_path / "broken")) == []
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


def test_the_base_stays_and_the_adapter_moves(base: Path, dataset: Path, tmp_path: Path) -> None:
    trainer = train(lora(dataset, base), tmp_path / "run")
    frozen = dict(load_trained(base).model.named_parameters())
    for name, parameter in trainer.parallel_model.parts[0].named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, frozen[name]), name
        elif name.endswith("lora_B"):
            assert bool(parameter.any()), name


@pytest.mark.parametrize("form", ["", "int8", "nf4"])
def test_a_trained_adapter_is_loaded_merged(base: Path, dataset: Path, tmp_path: Path, form: str) -> None:
    """Over what the base was while it was trained: rounded weights."""
    trainer = train(lora(dataset, base, "lora.dora=true", f"lora.base={form}"), tmp_path / "run")
    with torch.no_grad():
        expected = trainer.parallel_model.parts[0](TOKENS)
        found = load_trained(tmp_path / "run").model
        torch.testing.assert_close(found(TOKENS), expected, rtol=1e-5, atol=1e-5)
        assert float((load_trained(base).model(TOKENS) - expected).abs().max()) > 0.01
    assert found.state_dict().keys() == GPT(found.spec).state_dict().keys()


def test_another_base_is_refused(base: Path, dataset: Path, tmp_path: Path) -> None:
    """A run that went on, or a folder whose weights were replaced."""
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    train(lora(dataset, moved, "optim.steps=2"), tmp_path / "run")
    load_trained(tmp_path / "run")
    step = moved / "checkpoints" / "step-000010"
    train(lora(dataset, step, "optim.steps=2"), tmp_path / "pinned")
    longer = RunFolder(moved).spec_path
    longer.write_text(longer.read_text().replace("steps = 10", "steps = 12"))
    resume(moved)
    with pytest.raises(SpecError, match=r"holds other weights than those that the adapters of .* name the checkpoint"):
        load_trained(tmp_path / "run")
    with pytest.raises(SpecError, match="holds other weights"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(SpecError, match="holds other weights"):
        resume(tmp_path / "run")
    load_trained(tmp_path / "pinned")


def test_a_changed_hugging_face_folder_is_refused(hf: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "hf")
    train(lora(dataset, tmp_path / "hf", "optim.steps=2"), tmp_path / "run")
    GPT(load_trained(tmp_path / "run").model.spec, seed=9).save_hf(tmp_path / "hf")
    with pytest.raises(SpecError, match="holds other weights"):
        resume(tmp_path / "run")


def test_an_adapter_cannot_be_a_base(base: Path, dataset: Path, tmp_path: Path) -> None:
    train(lora(dataset, base, "optim.steps=2"), tmp_path / "run")
    with pytest.raises(SpecError, match="is a run of adapters; make a model of it with `lmworks checkpoint export`"):
        Trainer(lora(dataset, tmp_path / "run"), tmp_path / "next", quiet=True)


@pytest.mark.parametrize("options", [(), ("lora.dora=true",)], ids=["lora", "dora"])
def test_export_merge_and_start_from_a_peft_folder(
    hf: Path, dataset: Path, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The export of a run, and its adapter merged into the base by a command, are the same model."""
    spec = lora(dataset, hf, *options)
    train(spec, tmp_path / "run")
    merged, adapter, again = (str(tmp_path / name) for name in ("merged", "adapter", "again"))
    for command in (
        ("checkpoint", "export", str(tmp_path / "run"), merged),
        ("checkpoint", "export", str(tmp_path / "run"), adapter, "--adapter"),
        ("checkpoint", "merge", str(hf), adapter, again, "--json"),
    ):
        code, _, err = lmworks(capsys, *command)
        assert code == 0, err
    one, other = GPT.from_hf(merged), GPT.from_hf(again)
    expected = load_trained(tmp_path / "run").model
    with torch.no_grad():
        torch.testing.assert_close(one(TOKENS), expected(TOKENS), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other(TOKENS), one(TOKENS), rtol=0, atol=0)
    further = Trainer(lora(dataset, hf, *options, f"lora.init={adapter}"), tmp_path / "further", quiet=True)
    further.build()
    with torch.no_grad():
        torch.testing.assert_close(further.parallel_model.parts[0](TOKENS), expected(TOKENS), rtol=1e-5, atol=1e-5)
    code, _, err = lmworks(capsys, "checkpoint", "merge", str(hf), adapter, again)
    assert code == 2 and "exists and is not empty" in err


def test_a_run_without_adapters_has_none_to_export(base: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="trained all weights: it has no adapter"):
        export(base, tmp_path / "out", adapter=True)


@pytest.mark.slow  # tests/train/test_ranks.py has whole models, parity has adapters
def test_layouts_load_one_anothers_checkpoints(dataset: Path, tmp_path: Path) -> None:
    """Saved by FSDP2 and tensor parallelism, resumed by ZeRO-1, ends as if it had gone on."""
    wide = layout(dataset, "lora.rank=3", "lora.dora=true", "parallel.dp=2", "parallel.tp=2", "parallel.strategy=fsdp2")
    other = layout(
        dataset, "lora.rank=3", "lora.dora=true", "parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"
    )
    do([Job(tmp_path / "wide", wide)])
    do([Job(tmp_path / "other", other, source=tmp_path / "wide", last=2, save_first=True)])
    assert differences(saved(tmp_path / "wide", 2), saved(tmp_path / "other", 2)) in ([], ["rng"])
    one, two = saved(tmp_path / "wide", 3), saved(tmp_path / "other", 3)
    for name, value in one.items():
        if name.startswith("model."):
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)
