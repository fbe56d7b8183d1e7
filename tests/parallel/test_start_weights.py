"""Every layout starts from the same weights: those of a seed, of a Hugging Face folder, or of a run under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layouts import SPARSE, layout, with_meshes
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import LMWorksError, RunSpec
from lmworks.train import Trainer
from tiny import built, differences, saved, train

FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")
MIXTRAL = ("model.experts=4", "model.top_k=2", "model.expert_ffn=16")
GPT2 = (
    "model.norm=layer", "model.positions=learned", "model.mlp=gelu", "model.bias=true", "model.tie_embeddings=true",
    "model.kv_heads=4",
)  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel.dp=2",),
    "fsdp2": FSDP2,
    "fsdp1": ("parallel.dp=2", "parallel.strategy=fsdp1"),
    "zero-1": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"),
    "zero-2": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"),
    "zero-3": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=3"),
    "offload": (*FSDP2, "parallel.offload=full"),
    "tp": ("parallel.tp=2", "parallel.sp=true"),
    "pp": ("parallel.pp=2", "model.tie_embeddings=true"),
    "dualpipev": ("parallel.pp=2", "parallel.schedule=dualpipev", "model.layers=4"),
    "ep": ("parallel.dp=2", "parallel.ep=2", *SPARSE),
    "tp-experts": ("parallel.tp=2", *SPARSE),
}
STARTS: dict[str, tuple[str, ...]] = {  # from a folder of another, or of no, layout
    "llama-fsdp2": FSDP2,
    "llama-tp": ("parallel.tp=2",),
    "llama-pp": ("parallel.pp=2",),
    "gpt2-tp": (*GPT2, "parallel.tp=2"),
    "gpt2-fsdp2": (*GPT2, *FSDP2),
    "gpt2-pp": (*GPT2, "parallel.pp=2"),
    "mixtral-ep": (*MIXTRAL, "parallel.dp=2", "parallel.ep=2"),
    "mixtral-tp": (*MIXTRAL, "parallel.tp=2"),
}
FOUR = ("parallel.tp=2", *FSDP2)  # both cut the same rows
VARIATIONS = (  # of what stays
    "fsdp1", "zero-1", "zero-2", "zero-3", "offload", "dualpipev", "tp-experts", "llama-tp", "llama-pp", "gpt2-fsdp2",
    "gpt2-pp", "mixtral-tp",
)  # fmt: skip


def each(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in VARIATIONS else ()) for name in names]


def alone(keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if not key.startswith("parallel")]


@with_meshes
def save_starts(rank: int, cases: dict[Path, RunSpec]) -> None:
    """What each run begins with, as its layout saves it."""
    for folder, spec in cases.items():
        trainer = built(spec, folder)
        trainer.load()
        trainer.save()


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf-FAMILY/`, `run/` of one rank and two steps, and `NAME/` with the start of every case that is asked about."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    root = tmp_path_factory.mktemp("starts")
    for family, keys in {"llama": (), "gpt2": GPT2, "mixtral": MIXTRAL}.items():
        model = GPT(layout(dataset, *keys).model)
        model.init_weights(11)
        with torch.no_grad():  # norms and biases too: those of a seed are ones and zeros
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        model.save_hf(root / f"hf-{family}")
    train(layout(dataset, "optim.steps=2"), root / "run")
    cases = {root / name: layout(dataset, *keys) for name, keys in LAYOUTS.items() if name in asked}
    for name, keys in STARTS.items():
        if name in asked:
            cases[root / name] = layout(dataset, *keys, f"checkpoint.init={root}/hf-{name.split('-')[0]}")
    for name in ("fsdp2", "tp", "pp", "fsdp1"):
        keys = [key for key in LAYOUTS[name] if key.startswith("parallel")]
        cases[root / f"run-{name}"] = layout(dataset, *keys, f"checkpoint.init={root}/run")
    on_ranks(2, save_starts, cases)
    four = {"llama-four": f"{root}/hf-llama", "run-four": f"{root}/run", "four": ""}
    on_ranks(4, save_starts, {root / n: layout(dataset, *FOUR, f"checkpoint.init={s}") for n, s in four.items()})
    return root


def model_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}


@pytest.mark.parametrize("name", each(*LAYOUTS, "four"))
def test_the_seed_gives_every_layout_the_weights_of_one_rank(folders: Path, dataset: Path, name: str) -> None:
    model = GPT(layout(dataset, *alone(LAYOUTS.get(name, ()))).model)
    model.init_weights(0)
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    state = saved(folders / name)
    assert differences(model_of(state), expected) == []
    moments = [value for key, value in state.items() if key.startswith("optim.")]
    assert len(moments) == 3 * len(list(model.parameters())) and not any(moment.any() for moment in moments)


@pytest.mark.parametrize("name", each(*STARTS, "llama-four"))
def test_a_hugging_face_folder_gives_every_layout_its_weights(folders: Path, name: str) -> None:
    model = GPT.from_hf(folders / f"hf-{name.split('-')[0]}")
    assert differences(model_of(saved(folders / name)), {n: v.detach() for n, v in model.state_dict().items()}) == []


@pytest.mark.parametrize("name", ["fsdp2", "tp", "pp", "fsdp1", "four"])
def test_a_run_gives_another_layout_its_weights_and_nothing_else(folders: Path, name: str) -> None:
    state = saved(folders / f"run-{name}")
    assert differences(model_of(state), model_of(saved(folders / "run"))) == []
    assert state["step"] == 0 and not any(value.any() for key, value in state.items() if key.startswith("optim."))


# --- what does not fit ---------------------------------------------------------------------------------


@with_meshes
def refusals(rank: int, cases: dict[Path, RunSpec]) -> list[tuple[str, bool, bool]]:
    """(what is said, whether all ranks know it, whether the run folder was made) of each."""
    found = []
    for folder, spec in cases.items():
        try:
            trainer = Trainer(spec, folder, quiet=True)
            trainer.build()
            trainer.load()
        except LMWorksError as error:
            found.append((str(error), error.collective, folder.exists()))
    return found


def test_a_start_that_does_not_fit_is_refused_in_one_line_on_all_ranks(folders: Path, dataset: Path) -> None:
    changed, cut, run = folders / "hf-llama", folders / "hf-cut", folders / "run"
    cut.mkdir()
    (cut / "config.json").write_bytes((changed / "config.json").read_bytes())
    weights: dict[str, Any] = load_file(changed / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-2].clone()
    save_file(weights, cut / "model.safetensors")
    wrong = {
        (changed, "model.ffn=64"): r"config.json says ffn = 128, but model.ffn = 64",
        (changed, "model.norm=layer"): r"config.json says norm = rms, but model.norm = layer",
        (cut, "seed=0"): r"layers.1.mlp.up_proj.weight' has shape",
        (run, "model.ffn=64"): r"is (128, 32) there, but (64, 32) in this run",
        (folders / "nothing", "seed=0"): r"there is no such folder",
    }
    cases = {
        folders / f"wrong-{number}": layout(dataset, *FSDP2, key, f"checkpoint.init={start}")
        for number, (start, key) in enumerate(wrong)
    }
    first, second = on_ranks(2, refusals, cases)
    assert [message for message, _, _ in first] == [message for message, _, _ in second]
    for (message, collective, made), said in zip(first, wrong.values(), strict=True):
        assert said in message and "\n" not in message and collective, message
        assert not made or "is (128, 32)" in message  # a run is read only once the ranks have their shards
