"""<Tab>: presets, accelerators and spec keys, asked for as shells ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from typed import lmworks

SHELL = """
eval "$(_LMWORKS_COMPLETE=source_bash "$1")"
complete -p lmworks
offered() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lmworks_completion "$command"; echo "${COMPREPLY[@]}"; }
command=$1
offered lmworks train cpu
offered lmworks train tiny optim.sch
offered lmworks train tiny optim.schedule = co
offered lmworks plan search tiny --cluster 256xh200
"""


def test_bash_with_the_script_that_it_installs() -> None:
    command = Path(sys.executable).with_name("lmworks")
    result = subprocess.run(["bash", "-c", SHELL, "bash", command], capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "complete -o default -F _lmworks_completion lmworks",
        "cpu-3m cpu-10m",
        "optim.schedule=",
        "cosine constant",
        "256xh200",
    ]


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """What fish is told, name by name, in a folder with a spec and a folder."""
    (tmp_path / "tall.toml").touch()
    (tmp_path / "text.txt").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_LMWORKS_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")

    def ask(line: str) -> dict[str, str]:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        _, out, err = lmworks(capsys)
        assert err == ""
        return dict([*line.split("\t"), ""][:2] for line in out.splitlines() if line)

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lmworks train t", ["tiny", "tall.toml", "tests/"]),
        ("lmworks train x", []),  # no preset: the shell completes paths itself
        ("lmworks p", ["plan", "profile", "prove"]),  # former spellings are not offered, and complete what follows them
        ("lmworks hardware gb2", ["gb200"]),
        ("lmworks prove ", ["parity", "chaos", "simulate"]),
        ("lmworks plan gpt2-s", ["gpt2-small"]),
        ("lmworks plan sea", ["search"]),
        ("lmworks plan memory mix", ["mixtral-8x7b"]),
        ("lmworks generate gpt2-m", ["gpt2-medium"]),
        ("lmworks serve gpt2-m", ["gpt2-medium"]),
        ("lmworks serve tiny engine.kv_dt", ["engine.kv_dtype="]),
        ("lmworks bench offline --model mell", ["mellum-4b"]),
        ("lmworks train tiny o", [f"optim.{key}=" for key in (
            "optimizer", "steps", "lr", "schedule", "warmup", "min_lr_ratio", "decay_ratio", "beta1", "beta2", "eps",
            "weight_decay", "clip",
        )]),
        ("lmworks train tiny d", ["deterministic=", "data."]),
        ("lmworks train tiny model.rope_scaling.ty", ["model.rope_scaling.type="]),
        ("lmworks train tiny optim.schedule=c", ["optim.schedule=cosine", "optim.schedule=constant"]),
        ("lmworks train tiny data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
        ("lmworks train tiny cluster.gpu=h200", ["cluster.gpu=h200"]),
        ("lmworks train tiny model.preset=mell", ["model.preset=mellum-4b"]),
        ("lmworks train tiny optim.lr=", []),
        ("lmworks generate tiny engine.dt", ["engine.dtype="]),
        ("lmworks generate tiny engine.kv_dtype=f", ["engine.kv_dtype=fp8"]),
        ("lmworks plan hardware gb2", ["gb200"]),
        ("lmworks plan serve tiny --gpu l40", ["l40s"]),
        ("lmworks plan memory tiny --cluster 2x8xb20", ["2x8xb200"]),
    ],
)  # fmt: skip
def test_offers(offered: object, line: str, expected: list[str]) -> None:
    assert callable(offered)
    assert sorted(offered(line)) == sorted(expected)


def test_sections_come_before_keys_and_keys_say_what_they_mean(offered: object) -> None:
    assert callable(offered)
    assert {"optim.", "cluster.", "seed="} <= offered("lmworks train tiny ").keys()
    assert offered("lmworks train tiny optim.lr")["optim.lr="] == "peak learning rate (0.0003)"
    assert len(offered("lmworks plan memory tiny --cluster 8")) > 30


def test_no_torch_at_a_keystroke() -> None:
    asked = {"_LMWORKS_COMPLETE": "complete_bash", "COMP_WORDS": "lmworks train tiny cluster.gpu", "COMP_CWORD": "3"}
    code = (
        "import sys; from lmworks.cli.main import main\nsys.argv = ['lmworks']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    line = [sys.executable, "-c", code]
    result = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **asked})
    assert (result.returncode, result.stdout.split()) == (0, ["cluster.gpu=", "cluster.gpus_per_node="]), result.stderr
