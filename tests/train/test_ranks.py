"""Runs of several ranks stop, go on, and change their layout, as one rank's do: nothing is lost on the way.

One fork of ranks trains every layout of its size, and goes on with copies of the runs that lost their last steps.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from crafted import rewrite_index
from layouts import SPARSE, Job, do, layout
from lmworks.cli.main import main
from lmworks.record import RunFolder
from lmworks.spec import RunSpec
from lmworks.train.load_run import load_trained
from tiny import curve, differences, saved
from variations import with_slow

FSDP2 = ("parallel.strategy=fsdp2",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "one-moe": SPARSE,
    "ddp": ("parallel.dp=2",),
    "fsdp2": ("parallel.dp=2", *FSDP2),
    "fsdp1": ("parallel.dp=2", "parallel.strategy=fsdp1"),
    "zero-1": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"),
    "zero-2": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"),
    "offload": ("parallel.dp=2", *FSDP2, "parallel.offload=optimizer"),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2", "model.tie_embeddings=true"),
    "ep": ("parallel.dp=2", "parallel.ep=2", *SPARSE),
    "fsdp1-moe": ("parallel.dp=2", "parallel.strategy=fsdp1", *SPARSE),
    "tp-fsdp2": ("parallel.tp=2", "parallel.sp=true", "parallel.dp=2", *FSDP2),
    "hsdp": ("parallel.dp_replicate=2", "parallel.dp_shard=2", *FSDP2),
    "zbv": ("parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "model.tie_embeddings=true"),
    "fsdp1-tp": ("parallel.dp=2", "parallel.strategy=fsdp1", "parallel.tp=2"),
}
# Of what stays; `make test-slow` has them too.
VARIATIONS = ("ddp", "zero-2", "offload", "tp", "cp", "hsdp", "fsdp1", "fsdp1-tp", "zbv")
# From the checkpoint of one layout to another of any size; what is not about ranks stays as it was.
MOVES = [
    ("fsdp2", "one"), ("one", "tp"), ("pp", "fsdp2"), ("zero-1", "ddp"), ("tp-fsdp2", "pp"), ("fsdp1", "fsdp2"),
    ("fsdp2", "fsdp1"), ("ep", "one-moe"), ("one-moe", "ep"), ("offload", "zero-2"), ("zbv", "tp-fsdp2"),
    ("fsdp1-tp", "one"), ("fsdp1-moe", "one-moe"), ("fsdp1-moe", "ep"), ("one-moe", "fsdp1-moe"),
]  # fmt: skip
OTHER_MOVES = [
    ("fsdp2", "fsdp1"), ("one-moe", "ep"), ("fsdp1-moe", "one-moe"), ("fsdp1-moe", "ep"), ("one-moe", "fsdp1-moe"),
]  # fmt: skip


def is_slow(move: tuple[str, str]) -> bool:
    return move[0] in VARIATIONS or move in OTHER_MOVES


def spec_of(data: Path, model: str, ranks: str) -> RunSpec:
    """The model of one case on the ranks of another."""
    shape = [key for key in LAYOUTS[model] if not key.startswith("parallel")]
    return layout(data, *shape, *[key for key in LAYOUTS[ranks] if key.startswith("parallel")])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`name/` of every layout, `name-again/` taken up after step 2, and `name-to-other/` likewise under another."""
    root = tmp_path_factory.mktemp("runs")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    asked_moves = {item.callspec.params.get("move") for item in here}
    asked |= {move[0] for move in asked_moves if move}
    names = [name for name in LAYOUTS if name not in VARIATIONS or name in asked]
    specs = {name: layout(dataset, *LAYOUTS[name]) for name in names}
    do([Job(root / name, spec) for name, spec in specs.items()])
    again = [Job(root / f"{name}-again", spec, root / name, 2) for name, spec in specs.items()]
    moves = [move for move in MOVES if not is_slow(move) or move in asked_moves]
    moved = [Job(root / "-to-".join(move), spec_of(dataset, *move), root / move[0], 2, True) for move in moves]
    do(again + moved)
    return root


@pytest.mark.parametrize("name", with_slow(LAYOUTS, VARIATIONS))
def test_resume_in_same_layout_is_bitwise_equal(runs: Path, name: str) -> None:
    assert RunFolder(runs / f"{name}-again").next_attempt() == 2  # it was taken up, once
    assert differences(saved(runs / name), saved(runs / f"{name}-again")) == []
    assert curve(runs / name) == curve(runs / f"{name}-again")


@pytest.mark.parametrize("move", with_slow(MOVES, [move for move in MOVES if is_slow(move)]), ids="-to-".join)
def test_resume_in_other_layout_loads_exactly(runs: Path, move: tuple[str, str]) -> None:
    """Weights, optimizer states, and buffers are equal to the bit; so are the samples that follow."""
    source, target = runs / move[0], runs / "-to-".join(move)
    assert differences(saved(source, 2), saved(target, 2)) == []
    before, after = curve(source)[2], curve(target)[2]
    assert after[1] == pytest.approx(before[1], rel=1e-6)  # the loss of the next step
    assert after[5] == pytest.approx(before[5], rel=1e-5)  # and after it, on held-out data


def test_single_process_loads_fsdp1_experts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bias by which experts are chosen has the model's own name, so that everybody finds it."""
    run, name = runs / "fsdp1-moe", "model.blocks.0.mlp.choice_bias"
    assert saved(run).keys() == saved(runs / "one-moe").keys()
    assert saved(run)[name].any()
    bias = load_trained(run).model.state_dict()[name.removeprefix("model.")]
    assert differences({name: bias}, {name: saved(run)[name]}) == []
    losses = [json.loads(said_by(capsys, "eval", each, "--json"))["loss"] for each in (run, runs / "one-moe")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    told = said_by(capsys, "generate", run, "--prompt", "def", "--max-tokens", "5", "--greedy", "--json")
    assert [len(one["tokens"]) for one in json.loads(told)] == [5]


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with mock.patch.object(sys, "argv", ["lmworks", *map(str, arguments)]), contextlib.suppress(SystemExit):
        main()
    out = capsys.readouterr()
    assert not out.err
    return out.out


def test_old_fsdp1_names_are_read(runs: Path, tmp_path: Path) -> None:
    """As `…_fsdp_wrapped_module.mlp.choice_bias`; the bytes are those of a checkpoint that was written so."""
    run = tmp_path / "run"
    shutil.copytree(runs / "fsdp1-moe", run)
    wrap_names(run / "checkpoints" / "step-000003")
    assert differences(saved(run, 3), saved(runs / "fsdp1-moe", 3)) == []
    assert load_trained(run).step == 3


def wrap_names(folder: Path) -> None:
    def wrapped(name: str) -> str:
        return name.replace(".mlp.choice_bias", "._fsdp_wrapped_module.mlp.choice_bias")

    def change(index: dict[str, Any]) -> dict[str, Any]:
        tensors = {
            wrapped(n): {**one, "path": [wrapped(key) for key in one["path"]]} for n, one in index["tensors"].items()
        }
        assert len(tensors.keys() - index["tensors"].keys()) == 2  # a bias a layer
        return {"tensors": tensors}

    rewrite_index(folder, change)
