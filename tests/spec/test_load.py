"""Specs as files: inheritance, overrides, and a resolved spec that reads back as it was."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lmworks.spec import PRESETS, RunSpec, SpecError, dump_toml, load_run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_preset_by_name() -> None:
    spec = load_run("qwen3-0.6b", ["data.seq=64"])
    assert (spec.name, spec.model.layers, spec.data.seq) == ("qwen3-0.6b", 28, 64)


def test_overrides(tmp_path: Path) -> None:
    file = write(tmp_path / "wide.toml", "seed = 1\n[optim]\nlr = 1e-3\nsteps = 500")
    spec = load_run(
        file,
        [
            "optim.lr=3e-4",
            "model.layers = 8",
            "data.shuffle=false",
            "data.path=some/where: else",
            'data.mix={"a.b" = 2, c = 1}',
            "model.rope_scaling.type=linear",
            "model.rope_scaling.factor=2",
            "optim.lr=5e-4",
        ],
    )
    assert spec.name == "wide" and spec.seed == 1
    assert (spec.optim.lr, spec.optim.steps, spec.model.layers) == (5e-4, 500, 8)  # the last one wins
    assert spec.data.shuffle is False and spec.data.path == "some/where: else"
    assert spec.data.sources == {"a.b": 2.0, "c": 1.0}
    assert spec.model.rope_scaling.factor == 2.0


@pytest.mark.parametrize(("text", "steps"), [("1e3", 1000), ("2.5e3", 2500), ("1000.0", 1000), ("1_000", 1000)])
def test_whole_numbers_may_be_written_as_floats(tmp_path: Path, text: str, steps: int) -> None:
    file = write(tmp_path / "run.toml", f"[optim]\nsteps = {text}")
    for spec in (load_run(file), load_run("tiny", [f"optim.steps={text}"])):
        assert (spec.optim.steps, type(spec.optim.steps)) == (steps, int)
        assert f"steps = {steps}\n" in dump_toml(spec.to_dict())


def test_extends(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", 'seed = 1\n[optim]\nlr = 1.0\nsteps = 10\n[model]\npreset = "tiny"')
    write(tmp_path / "deep" / "fast.toml", 'extends = "../base.toml"\n[optim]\nlr = 2.0')
    write(tmp_path / "deep" / "big.toml", "[model]\nlayers = 3\n[optim]\nsteps = 20")
    file = write(tmp_path / "run.toml", 'extends = ["deep/fast.toml", "deep/big.toml"]\n[data]\nmicro_batch = 2')
    spec = load_run(file)
    assert (spec.seed, spec.optim.lr, spec.optim.steps) == (1, 2.0, 20)  # later files win, key by key
    assert (spec.model.layers, spec.model.hidden, spec.data.micro_batch) == (3, 64, 2)


def test_two_files_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "seed = 7")
    for name in "ab":
        write(tmp_path / f"{name}.toml", 'extends = "base.toml"')
    assert load_run(write(tmp_path / "c.toml", 'extends = ["a.toml", "b.toml"]')).seed == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "nowhere.toml"', r"no spec at .*nowhere.toml: the file does not exist \(extended by .*run.toml\)"),
        ('extends = "run.toml"', "'extends' goes in a circle: run.toml → run.toml"),
        ('extends = "other.toml"', "'extends' goes in a circle: run.toml → other.toml → run.toml"),
        ("extends = 3", "run.toml: 'extends' must be a file name or a list of them, got 3"),
        ('extends = "."', "cannot read .*: Is a directory"),
        ("[optim\nlr = 1", "run.toml is not valid TOML: .*line 1"),
        ("seed = 1\nseed = 2", "run.toml is not valid TOML: Cannot overwrite a value"),
        ("seed = " + "9" * 5000, "run.toml is not valid TOML"),
    ],
    ids=lambda value: value[:30],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "other.toml", 'extends = "run.toml"')
    with pytest.raises(SpecError, match=message) as caught:
        load_run(write(tmp_path / "run.toml", text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"seed = \xff\xfe")
    with pytest.raises(SpecError, match=r"run.toml is not valid TOML"):
        load_run(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gpt2-smal", "'gpt2-smal' is neither a file nor a model preset; did you mean 'gpt2-small'?"),
        ("nowhere.toml", "no spec at nowhere.toml: the file does not exist$"),
        ("some/where", "no spec at some/where: the file does not exist$"),
        ("config/tiny.toml", "config/tiny.toml: the file does not exist; did you mean 'configs/tiny.toml'?"),
        ("configs/smal.toml", "configs/smal.toml: the file does not exist; did you mean 'configs/small.toml'?"),
        ("7b-8-h100.toml", "does not exist; did you mean 'configs/reference/7b-8-h100.toml'?"),
        ("x" * 1000, "cannot read x+: File name too long"),
    ],
    ids=lambda value: value[:20],
)
def test_no_such_source(source: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        load_run(source)


@pytest.mark.parametrize("override", ["optim.lr", "--lr=3", "=3", "lr 3"])
def test_not_an_override(override: str) -> None:
    with pytest.raises(SpecError, match=r"is not an override; write section.key=value"):
        load_run("tiny", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.l=1", "unknown key 'optim.l'; did you mean 'lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optim.lr'?"),
        ("model.lr=1", "unknown key 'model.lr'; did you mean 'optim.lr'?"),
        ("training.lr=1", "unknown key 'training'; did you mean 'optim.lr'?"),
        ("optimizer=sgd", "unknown key 'optimizer'; did you mean 'optim.optimizer'?"),
        ("every=3", "unknown key 'every'; did you mean 'checkpoint.every' or 'log.every'?"),
        ("batch_size=4", "unknown key 'batch_size'; did you mean 'data.micro_batch' or 'data.global_batch'?"),
        ("foo=4", "unknown key 'foo'; known: align, checkpoint, cluster, data,"),
        (".lr=1", "unknown key ''"),
        ("optim.lr.x=1", "optim.lr must be a number"),
        ("optim.lr=", "optim.lr must be a number, got ''"),
        ("optim.steps=1.5e0", "optim.steps must be a whole number, got 1.5"),
        ("optim.steps=1e30", "optim.steps is out of range: it does not fit in 64 bits"),
        ("optim.steps=inf", "optim.steps must be a whole number, got inf"),
        ("model=tiny", "model: expected a table, got 'tiny'"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        load_run("tiny", [override])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_spec_reads_back(tmp_path: Path, preset: str) -> None:
    spec = load_run(preset, ["data.global_batch=32", "parallel.dp=2", "parallel.strategy=fsdp2"])
    write(tmp_path / "spec.toml", dump_toml(spec.to_dict()))
    assert load_run(tmp_path) == spec  # from the run folder
    assert load_run(tmp_path / "spec.toml") == spec


ODD = [
    "C:\\data\\new",
    "quote \" and '",
    "tab\there",
    "line\nbreak",
    "\x00\x7f\x85",
    "ünï → ☃ 𝕏",
    "\U000e0001",
    "a.b c#=[]",
    "",
]


@pytest.mark.parametrize("text", ODD, ids=repr)
def test_odd_strings_survive(text: str) -> None:
    spec = RunSpec.from_dict(
        {"log": {"project": text}, "data": {"path": text, "mix": {text: 0.1, "plain_key-1": 1e-300}}}
    )
    written = dump_toml(spec.to_dict())
    assert RunSpec.from_dict(tomllib.loads(written)) == spec


@pytest.mark.parametrize("number", [3e-4, 1 / 3, 1e-8, 0.1 + 0.2, 5e-324, 9.999999999999999])
def test_numbers_survive_exactly(number: float) -> None:
    spec = RunSpec.from_dict({"optim": {"eps": number}})
    assert RunSpec.from_dict(tomllib.loads(dump_toml(spec.to_dict()))).optim.eps == number
