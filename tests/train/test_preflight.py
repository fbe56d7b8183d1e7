"""What this machine has no memory or no GPU for is refused by every command, before anything is started or made."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from lmworks.bench import data_parallel
from lmworks.bench.data_parallel import with_strategy
from lmworks.bench.precision.study import study as precision_study
from lmworks.cli import ranks as agent
from lmworks.parallel import preflight
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.memory.fit import peak_rows, total
from lmworks.prove import parity
from lmworks.prove.parity import Parity
from lmworks.record import RunFolder
from lmworks.spec import LMWorksError, RunSpec, SpecError, TrainingError
from lmworks.train import Trainer
from tiny import make_spec, write_spec
from typed import lmworks

MIB = 2**20
CPU = torch.device("cpu")
NO_GPU = "cluster.gpu = 'H100-SXM-80GB', and this machine has no GPU; --device cpu runs it here"


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def give(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A machine with so many bytes left."""
    monkeypatch.setattr(preflight, "available_bytes", lambda: size)


def need(spec: RunSpec) -> int:
    return sum(total(peak_rows(spec, rank, "cpu")) for rank in range(spec.parallel.world))


@pytest.fixture
def spec_file(dataset: Path, tmp_path: Path) -> Path:
    return write_spec(make_spec(dataset, "optim.steps=2"), tmp_path / "small.toml")


@pytest.mark.parametrize(
    "experts", [(), ("model.experts=4", "model.top_k=2", "model.expert_ffn=64")], ids=["dense", "experts"]
)
def test_oversized_train_is_rejected_before_folder_is_created(
    experts: tuple[str, ...],
    spec_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    words = ("train", str(spec_file), *experts, "--run-dir", str(run))
    give(monkeypatch, MIB)
    code, _, err = lmworks(capsys, *words)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("lmworks: error: tiny needs 0.00") and "and 0.000977 GiB are free: " in err
    assert not run.exists()
    assert lmworks(capsys, *words, "--force")[0] == 0
    assert RunFolder(run).spec().optim.steps == 2


def test_memory_of_all_ranks_is_checked_before_start(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its runtime to load too."""
    words = ("train", str(spec_file), "parallel.dp=2", "--run-dir", str(tmp_path / "run"))
    given = make_spec(Path("x"), "parallel.dp=2", "optim.steps=2")
    enough = need(given) + 2 * preflight.RUNTIME
    with mock.patch("lmworks.cli.ranks.run_ranks", return_value=agent.RanksExit()) as start:
        give(monkeypatch, enough - 1)
        code, _, err = lmworks(capsys, *words)
        assert code == 2 and "for the 2 ranks on this machine" in err and "runtime 0.293 GiB" in err
        start.assert_not_called()
        lmworks(capsys, *words, "--force")
        assert start.call_args.args[1][-1] == "--force"  # the ranks are not to refuse it either
        give(monkeypatch, enough)
        assert lmworks(capsys, *words)[0] == 0
        assert "--force" not in start.call_args.args[1]
    with mock.patch("lmworks.cli.ranks.run_ranks", return_value=agent.RanksExit()) as start:
        give(monkeypatch, enough - 1)
        assert lmworks(capsys, "bench", "train", str(spec_file), "parallel.dp=2")[0] == 2
        start.assert_not_called()
        lmworks(capsys, "bench", "train", str(spec_file), "parallel.dp=2", "--force")
        start.assert_called_once()


def test_oversized_resume_and_bench_are_rejected(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, make_spec(tmp_path / "data"))
    give(monkeypatch, MIB)
    for words in (("resume", str(run)), ("bench", "train", str(spec_file), "--steps", "1")):
        code, _, err = lmworks(capsys, *words)
        assert code == 2 and " are free: " in err and err.endswith("--force starts it all the same\n")


def refused_rank(rank: int, spec: RunSpec, folder: Path, size: int) -> str:
    with mock.patch.object(preflight, "available_bytes", lambda: size), pytest.raises(LMWorksError) as error:
        Trainer(spec, folder, quiet=True)
    assert error.value.collective and error.value.exit_code == 2  # the first rank says it for all
    return str(error.value)


def test_external_ranks_agree_on_rejection(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu")
    said = on_ranks(2, refused_rank, spec, tmp_path / "run", need(spec) - 1)
    assert said[0] == said[1] and "for the 2 ranks on this machine" in said[0]
    assert not (tmp_path / "run").exists()


def test_ranks_of_other_machines_are_not_counted(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(dataset, "parallel.dp=4", "data.micro_batch=1")
    give(monkeypatch, need(spec) // 2)
    with pytest.raises(SpecError, match="for the 4 ranks"):
        preflight.check_fits_memory(spec, CPU)
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    preflight.check_fits_memory(spec, CPU)
    give(monkeypatch, need(spec) // 2 - 4)
    with pytest.raises(SpecError, match="for the 2 ranks"):
        preflight.check_fits_memory(spec, CPU)


def test_free_gpu_memory_is_used(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what this process's allocator has kept. Another rank has a GPU of its own."""
    spec = make_spec(dataset, "parallel.dp=2")
    peak = total(peak_rows(spec, 1, "cuda"))
    monkeypatch.setenv("RANK", "1")
    free = {"free": peak - 3}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["free"], 2 * peak))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2)
    device = torch.device("cuda", 1)
    preflight.check_fits_memory(spec, device)
    free["free"] -= 1
    with pytest.raises(SpecError, match="of GPU memory, and"):
        preflight.check_fits_memory(spec, device)
    preflight.check_fits_memory(spec, device, starting=True)  # who starts ranks does not touch their GPUs


def test_parity_memory_includes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.spec.layouts import layouts

    layout = layouts()["ddp"]
    spec = layout.run()
    enough = sum(total(peak_rows(spec, rank, "cpu", parity.comparison_memory)) for rank in range(spec.parallel.world))
    assert enough > need(spec) + 2 * parity.BYTES_PER_WEIGHT * spec.model.params
    give(monkeypatch, enough - 1)
    proof = Parity(tmp_path, quick=True)
    with (
        mock.patch.object(parity, "on_ranks", side_effect=AssertionError("started")),
        pytest.raises(SpecError, match="gradients and weights to compare"),
    ):
        proof.prove(layout)
    proof.force = True
    with mock.patch.object(parity, "on_ranks", side_effect=TrainingError("started")), pytest.raises(TrainingError):
        proof.prove(layout)


def test_study_memory_counts_all_strategies(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(dataset)
    both = [with_strategy(spec, 2, data_parallel.strategy_keys(name)) for name in (data_parallel.BASE, "FSDP2 reshard")]
    give(monkeypatch, sum(map(need, both)) - 1)
    with (
        mock.patch.object(data_parallel, "on_ranks", side_effect=AssertionError("started")),
        pytest.raises(SpecError, match=r"other strategies .*free|free.*other strategies") as error,
    ):
        data_parallel.study(spec, 2, 1, ["fsdp2-reshard"], jobs=False)
    assert "parallel.strategy" not in str(error.value) and "parallel.dp" not in str(error.value)  # they are the subject
    give(monkeypatch, sum(map(need, both)))
    with (
        mock.patch.object(data_parallel, "on_ranks", side_effect=TrainingError("started")),
        pytest.raises(TrainingError),
    ):
        data_parallel.study(spec, 2, 1, ["fsdp2-reshard"], jobs=False)


def test_precision_study_is_rejected_before_folder_is_created(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, MIB)
    with pytest.raises(SpecError, match="another precision"):
        precision_study(make_spec(dataset), tmp_path / "out", ["bf16"])
    assert not (tmp_path / "out").exists()


def test_simulate_has_no_memory_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of experts for a GPU that is not here, on a machine with nothing left."""
    give(monkeypatch, 0)
    model = ("model.layers=1", "model.hidden=2048", "model.experts=16", "model.expert_ffn=4096", "data.seq=32")
    code, out, err = lmworks(
        capsys, "simulate", "tiny", *model, "parallel.dp=2", "parallel.ep=2", "cluster.gpu=h100",
        "cluster.gpus_per_node=2", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["memory"]["peak_bytes"] > 3 * 2**30


# --- a GPU that is not here -----------------------------------------------------------------------------


def test_a_spec_that_names_a_gpu_needs_one(spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = (str(spec_file), "cluster.gpu=h100")
    for command in (
        ("train", *words, "--run-dir", str(run)),
        ("bench", "train", *words),
        ("study", "precision", *words),
    ):
        code, _, err = lmworks(capsys, *command)
        assert code == 2 and NO_GPU in err and err.count("\n") == 1
    several = ("train", *words, "parallel.dp=2", "--run-dir", str(run))
    with mock.patch("lmworks.cli.ranks.run_ranks") as start:
        assert lmworks(capsys, *several)[0] == 2
        start.assert_not_called()
    assert not run.exists()

    assert lmworks(capsys, "train", *words, "--run-dir", str(run), "--device", "cpu")[0] == 0
    assert RunFolder(run).spec().cluster.device == "cpu"
    assert lmworks(capsys, "eval", str(run))[0] == 0


def test_gpu_run_resumes_on_cpu_only_if_requested(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, make_spec(dataset, "optim.steps=2", "cluster.gpu=h100"))
    code, _, err = lmworks(capsys, "resume", str(run))
    assert code == 2 and NO_GPU in err
    assert lmworks(capsys, "resume", str(run), "--device", "cpu")[0] == 0
    assert RunFolder(run).spec().cluster.device == "auto"  # as it was written


@pytest.mark.parametrize(
    ("device", "says"),
    [("cuda", "cluster.device = 'cuda', but there is no CUDA device"), ("tpu", "cluster.device = 'tpu' is not one of")],
)
def test_missing_device_is_usage_error(
    device: str, says: str, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = lmworks(capsys, "train", str(spec_file), "--device", device)
    assert code == 2 and says in err


def test_oversized_reference_run_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what this machine really has: eight ranks of 78 GiB."""
    config = Path(__file__).parents[2] / "configs" / "reference" / "7b-8-h100.toml"
    monkeypatch.chdir(tmp_path)
    with mock.patch("lmworks.cli.ranks.run_ranks") as start:
        code, out, err = lmworks(capsys, "train", str(config))
        assert (code, out) == (2, "") and NO_GPU in err
        code, out, err = lmworks(capsys, "train", str(config), "--device", "cpu")
        assert (code, out) == (2, "") and err.count("\n") == 1
        start.assert_not_called()
    assert " for the 8 ranks on this machine, 7" in err and "gradients 27 GiB, " in err
    assert list(tmp_path.iterdir()) == []


def test_oversized_quantize_is_rejected_before_loading(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, make_spec(dataset))
    give(monkeypatch, 4 * MIB)
    words = ("quantize", str(run), "--scheme", "int4", "--out", str(tmp_path / "out"))
    code, _, err = lmworks(capsys, *words)
    assert code == 2 and "and 0.00391 GiB are free: states between blocks " in err and "; --tokens " in err
    assert "has no checkpoint yet" in lmworks(capsys, *words, "--force")[2]
