"""After a pass: the learner's part inside LMWorks' own trainer, its losses beside those without it.

Where the product has no such part (the course's own training step and checkpoint), the course's trainer runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ..spec.files import cache_root, write_whole
from .answers import load, write_references
from .beside import BESIDE, Row, table_beside
from .checking.check import copy_sources, preload
from .checking.run_isolated import Outcome, run_isolated
from .checking.traffic import TRAFFIC
from .course_files import course_sources
from .exercise import Exercise
from .workspace import Workspace

STEPS = 24
SHOWN = (1, 4, 8, 16, 24)
SECONDS = 60.0


def show_effect(workspace: Workspace, exercise: Exercise) -> list[str]:
    """Lines to print."""
    if exercise.id in BESIDE:
        return numbers_beside(workspace, exercise)
    if exercise.id not in PLUGS and exercise.id not in IN_COURSE:
        return [f"See it at work: {exercise.test}"] if exercise.test else []
    for room in ("lmworks.train", "lmworks.data"):  # before the fork
        importlib.import_module(room)
    in_course = exercise.id in IN_COURSE
    reference = reference_losses("course" if in_course else "product")
    if reference.result is None:
        return [f"In training the reference itself does not run: {reference.why}", *reference.output.splitlines()[-5:]]
    measure = course_losses if in_course else partial(plugged_losses, exercise)
    outcome = with_answer(workspace, exercise, measure)
    if outcome.result is None:
        why = outcome.why or "no result"
        return [f"In training it does not work yet: {why}", *outcome.output.splitlines()[-5:]]
    return curves("your trainer" if in_course else "LMWorks' own trainer", reference.result, outcome.result)


def with_answer(workspace: Workspace, exercise: Exercise, measure: Callable[[Path], Any]) -> Outcome:
    """`measure` gets a copy of the workspace with the learner's part among references."""
    text, _ = workspace.with_reference_around(exercise)
    with tempfile.TemporaryDirectory(prefix="lmworks-learn-") as temporary:
        folder = Path(temporary, "workspace")
        copy_sources(workspace, folder)
        (folder / exercise.file).write_text(text)
        return run_isolated(partial(measure, folder), folder, SECONDS)


def numbers_beside(workspace: Workspace, exercise: Exercise) -> list[str]:
    """The learner's numbers and those of LMWorks' own function, which the learner's part computes too."""
    preload(exercise)
    outcome = with_answer(workspace, exercise, partial(measured_beside, exercise))
    if outcome.result is None:
        return [f"Beside LMWorks' own it does not run: {outcome.why}", *outcome.output.splitlines()[-5:]]
    rows, traffic = outcome.result
    return table_beside([Row(*one) for one in rows]) + traffic


def measured_beside(exercise: Exercise, folder: Path) -> tuple[list[Any], list[str]]:
    """Rows of numbers, and lines on the bytes that a kernel moves."""
    module = load(folder, exercise.file)
    traffic = TRAFFIC[exercise.id](module) if exercise.id in TRAFFIC else []
    return list(map(astuple, BESIDE[exercise.id](module))), traffic


def reference_losses(kind: str) -> Outcome:
    """Without the learner's part, measured once for a version of LMWorks and of PyTorch. `kind`: product or course."""
    file, version = cache_root() / "learn" / f"{kind}.json", measured_version()
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        if kept["version"] == version:
            return Outcome(list(map(float, kept["losses"])), "", "", 0.0)
    with tempfile.TemporaryDirectory(prefix="lmworks-learn-") as temporary:
        folder = Path(temporary, "workspace")
        write_references(folder)
        measure = course_losses if kind == "course" else product_losses
        outcome = run_isolated(partial(measure, folder), folder, SECONDS)
    if outcome.result is not None:
        with suppress(OSError):  # it is measured again the next time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"version": version, "losses": outcome.result}))
    return outcome


def measured_version() -> str:
    """Of all that the losses depend on: our source, the library, and what kind of processor it computes on."""
    torch, package = importlib.import_module("torch"), Path(__file__).parents[1]
    digest = hashlib.sha256(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def curves(where: str, reference: list[float], yours: list[float]) -> list[str]:
    at = [step for step in SHOWN if step <= len(reference)]
    rows = [("step", [f"{step:>7}" for step in at])]
    rows += [(label, [f"{losses[step - 1]:7.3f}" for step in at])
             for label, losses in (("reference", reference), ("yours", yours))]  # fmt: skip
    apart = max(abs(one - other) for one, other in zip(reference, yours, strict=True))
    return [
        f"In {where}, {len(reference)} steps of a small model, the loss:",
        *(f"  {label:<10}{''.join(cells)}" for label, cells in rows),
        f"  at most {apart:.1g} apart",
    ]


def plugged_losses(exercise: Exercise, folder: Path) -> list[float]:
    module = load(folder, exercise.file)
    with PLUGS[exercise.id](module):
        return product_losses(folder)


def make_tokens(folder: Path) -> Path:
    """The course's own programs, as bytes."""
    from ..data import prepare

    documents = folder / "text.jsonl"
    pieces = [text[at : at + 400] for text in course_sources().values() for at in range(0, len(text), 400)]
    documents.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces * 20))
    return prepare([str(documents)], folder / "tokens", workers=1).folder


def product_losses(folder: Path) -> list[float]:
    """Of LMWorks' own trainer; tokens and run are left in the folder."""
    from ..record import read_metrics
    from ..spec import RunSpec
    from ..train import Trainer

    spec = RunSpec.from_dict(
        {
            "name": "learn",
            "model": {"preset": "tiny", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "init_std": 0.02},
            "data": {"path": str(make_tokens(folder)), "seq": 64, "micro_batch": 8, "global_batch": 8},
            "optim": {"steps": STEPS, "lr": 1e-2, "warmup": 4},
            "checkpoint": {"every": 0},
            "log": {"eval_every": 0},
        }
    )
    run = folder / "run"
    Trainer(spec, run, quiet=True).run()
    return [float(line["loss"]) for line in read_metrics(run / "metrics.jsonl")]


# --- plugs: the product with the learner's part in it -----------------------------------------------------


@contextmanager
def rmsnorm(module: ModuleType) -> Iterator[None]:
    gpt = importlib.import_module("lmworks.model.gpt")
    with patch.object(gpt.RMSNorm, "forward", module.RMSNorm.forward):
        yield


@contextmanager
def rotary(module: ModuleType) -> Iterator[None]:
    """The product keeps (−sin, sin) beside (cos, cos); the course keeps (sin, sin)."""
    gpt, torch = importlib.import_module("lmworks.model.gpt"), importlib.import_module("torch")

    def rotate_qk(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        low, high = sin.chunk(2, dim=-1)
        return module.apply_rotary_pos_emb(q, k, cos, torch.cat((-low, high), dim=-1))

    with patch.object(gpt, "rotate_qk", rotate_qk):
        yield


@contextmanager
def swiglu(module: ModuleType) -> Iterator[None]:
    gpt = importlib.import_module("lmworks.model.gpt")
    layer = module.MLP(module.SIZES["tiny"])

    def forward(self: Any, x: Any) -> Any:
        layer.gate_proj, layer.up_proj, layer.down_proj = self.gate, self.up, self.down
        return layer(x)

    with patch.object(gpt.MLP, "forward", forward):
        yield


@contextmanager
def attention(module: ModuleType) -> Iterator[None]:
    """Its projections hand over the queries, keys and values that the product has made."""
    ours, torch = importlib.import_module("lmworks.model.attention"), importlib.import_module("torch")
    layer = module.CausalSelfAttention(module.SIZES["tiny"])
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        delattr(layer, name)
    layer.o_proj = lambda x: x

    def sdpa(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
        if mask is not None or not causal:
            raise ValueError("the exercise is plain causal attention")
        batch, seq, heads, dim = q.shape
        layer.num_heads, layer.head_dim = heads, dim
        for name, value in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            setattr(layer, name, lambda _, value=value: value.flatten(-2))
        tables = torch.ones(seq, dim), torch.zeros(seq, dim)  # they are turned already
        return layer(q.flatten(-2), *tables).view(batch, seq, heads, dim)

    with patch.object(ours, "sdpa", sdpa):
        yield


@contextmanager
def init_weights(module: ModuleType) -> Iterator[None]:
    """Each matrix as a module of its kind; the draws are others, so the losses differ by luck."""
    weights, torch = importlib.import_module("lmworks.parallel.initial_weights"), importlib.import_module("torch")
    original, model = weights.initial_weight, module.GPT(module.SIZES["tiny"])

    def initial_weight(spec: Any, seed: int, name: str, shape: Any) -> Any:
        if len(shape) < 2:
            return original(spec, seed, name, shape)
        layer = torch.nn.Embedding(*shape) if name.startswith("embed") else torch.nn.Linear(shape[1], shape[0], False)
        model.config = dataclasses.replace(model.config, init_std=spec.init_std)
        model._init_weights(layer)
        return layer.weight.detach()

    with patch.object(weights, "initial_weight", initial_weight):
        yield


@contextmanager
def optimizer(module: ModuleType) -> Iterator[None]:
    optim, torch = importlib.import_module("lmworks.train.optim"), importlib.import_module("torch")

    def parameter_groups(shards: Any, model: Any, settings: Any) -> list[dict[str, Any]]:
        trainer = bare_trainer(module, weight_decay=settings.weight_decay, learning_rate=settings.lr)
        trainer.model = torch.nn.Module()
        for shard in shards:
            trainer.model.register_parameter(shard.name.replace(".", "_"), shard.leaf)
        groups = trainer._setup_optimizer().param_groups
        return [
            {"params": one["params"], "weight_decay": one["weight_decay"], "lr": one["lr"], "lr_scale": 1.0}
            for one in groups
        ]

    with patch.object(optim, "parameter_groups", parameter_groups):
        yield


@contextmanager
def lr_schedule(module: ModuleType) -> Iterator[None]:
    step_module = importlib.import_module("lmworks.train.step")

    def learning_rate(optim: Any, step: int) -> float:
        trainer = bare_trainer(
            module, learning_rate=optim.lr, min_lr=optim.lr * optim.min_lr_ratio, warmup_steps=optim.warmup,
            max_steps=optim.steps - 1,
        )  # fmt: skip
        return float(trainer.get_lr(step))

    with patch.object(step_module, "learning_rate", learning_rate):
        yield


def bare_trainer(module: ModuleType, **arguments: Any) -> Any:
    """The learner's class with arguments alone: no model, no ranks."""
    trainer = object.__new__(module.DistributedTrainer)
    trainer.args = module.TrainingArguments(**arguments)
    return trainer


PLUGS: dict[str, Callable[[ModuleType], Any]] = {
    "rmsnorm": rmsnorm,
    "rotate_half": rotary,
    "rotary": rotary,
    "swiglu": swiglu,
    "attention": attention,
    "init_weights": init_weights,
    "optimizer": optimizer,
    "lr_schedule": lr_schedule,
}


# --- the course's own trainer ----------------------------------------------------------------------------

IN_COURSE = ("gpt_forward", "train_step", "ddp_checkpoint")


def course_losses(folder: Path) -> list[float]:
    """Stopped half-way and gone on from its checkpoint."""
    ddp = load(folder, "src/training/ddp_trainer.py")
    settings = {"model_size": "tiny", "batch_size": 8, "seq_len": 64, "max_steps": STEPS, "learning_rate": 1e-2,
                "min_lr": 1e-3, "warmup_steps": 4, "grad_accum_steps": 2, "output_dir": "run"}  # fmt: skip
    losses: list[float] = []
    for part in (False, True):
        trainer = ddp.DistributedTrainer(ddp.TrainingArguments(**settings, resume=part))
        if part:
            trainer.load_checkpoint(Path("run", "checkpoint.pt"))
        for _ in range(STEPS // 2):
            losses.append(trainer.train_step(trainer.micro_batches(trainer.step))["loss"])
        trainer.save_checkpoint(Path("run", "checkpoint.pt"))
    return losses
