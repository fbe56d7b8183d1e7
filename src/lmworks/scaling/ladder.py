"""A ladder: the runs of a scaling study, planned before any of them is started.

A file says which sizes, budgets and context lengths (`Ladder`); `plan` turns it into runs. Shapes are those whose exact
parameter count is nearest to a wanted size, and an iso-FLOP budget buys C / (exact FLOPs of a token) tokens, attention
included. Every run's learning rate ends its decay at its own number of tokens: by a cosine each, or (schedule = "wsd")
as a branch of one long run a shape, the trunk, that leaves it where its cool-down begins (Hägele et al. 2024).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..plan.flops import model_flops_per_token
from ..record.formatting import short
from ..spec import ModelSpec, RunSpec, SpecError
from ..spec.errors import did_you_mean
from ..sweep.space import Point
from . import rules
from .shapes import family

USUAL = 96.0  # width over layers
NEAR = 0.04  # sizes that differ by less: the shape with the more usual proportions is taken
FEWEST_STEPS = 20
FEWEST_FOR_HOLDOUT = 6
SHAPE_KEYS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")


@dataclass(frozen=True)
class Holdout:
    """The run that the others predict before it is started."""

    flops: float
    params: float = 0.0  # 0: the optimum of the fit


@dataclass(frozen=True)
class Ladder:
    """LADDER.toml. Sizes come with budgets (`flops`, iso-FLOP) or with `tokens`, every one with every one."""

    spec: str  # data, optimizer, precision, layout and the vocabulary; a path is relative to the ladder's file
    params: tuple[float, ...]
    flops: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    seq: tuple[int, ...] = ()  # () : data.seq of the spec
    count: str = "total"  # what `params` counts: total, or no-embed
    tokens_per_param: tuple[float, float] = (0.0, math.inf)  # other pairs are left out
    min_tokens: float = 0.0  # shorter runs are left out
    min_layers: int = 2
    schedule: str = "cosine"  # or wsd
    decay_ratio: float = 0.2  # wsd: part of a run in which the rate falls
    lr: float = 0.0  # 0: by rule
    lr_factor: float = 1.0  # times the rule's
    max_lr: float = 0.01  # of the rule, which was fitted to larger models
    batch_tokens: float = 0.0  # 0: by rule
    max_epochs: float = 4.0  # how often a run may see the same text (Muennighoff et al. 2023: up to 4 is nearly new)
    holdout: Holdout | None = None

    @classmethod
    def read(cls, path: str | Path) -> Ladder:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read the ladder {path}: {error.strerror}") from None
        except ValueError as error:
            raise SpecError(f"{path} is not valid TOML: {error}") from None
        return cls.of(table, str(path))

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str = "ladder") -> Ladder:
        known = {one.name: one for one in fields(cls)}
        for key in table:
            if key not in known:
                raise SpecError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}")
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key == "holdout":
                values[key] = None if value is None else read_holdout(value, where)
            elif isinstance(known[key].default, str) or key == "spec":
                values[key] = text(value, key, where)
            elif isinstance(known[key].default, (int, float)):
                values[key] = number(value, key, where)
            else:
                values[key] = tuple(number(one, key, where) for one in as_list(value, key, where))
        for key in ("spec", "params"):
            if not values.get(key):
                raise SpecError(f"{where}: {key} is missing" + (" or empty" if key in values else ""))
        for one in values.get("seq", ()):
            if one != int(one):
                raise SpecError(f"{where}: seq has {one:g}; it must be a whole number of tokens")
        values["seq"] = tuple(int(one) for one in values.get("seq", ()))
        if (layers := values.setdefault("min_layers", cls.min_layers)) != int(layers):
            raise SpecError(f"{where}: min_layers = {layers:g} must be a whole number")
        values["min_layers"] = int(layers)
        return cls(**values).checked(where)

    def checked(self, where: str) -> Ladder:
        if bool(self.flops) == bool(self.tokens):
            both = "both are given" if self.flops else "neither is given"
            raise SpecError(f"{where}: give flops (iso-FLOP budgets) or tokens; {both}")
        for key, choices in (("count", ("total", "no-embed")), ("schedule", ("cosine", "wsd"))):
            if (value := getattr(self, key)) not in choices:
                raise SpecError(f"{where}: {key} = {value!r}: give {' or '.join(choices)}")
        if not 0 < self.decay_ratio < 1:
            raise SpecError(f"{where}: decay_ratio = {self.decay_ratio:g} must lie between 0 and 1")
        if len(self.tokens_per_param) != 2:
            raise SpecError(f"{where}: tokens_per_param is a range, e.g. [5, 200]")
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        table = {**asdict(self), "tokens_per_param": [one for one in self.tokens_per_param if math.isfinite(one)]}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


@dataclass(frozen=True)
class LadderRun:
    """A run of the ladder, and what it will be in a fit. With `parent` it branches off that run after `fork` steps."""

    overrides: Point
    n: int
    n_no_embed: int
    d: int
    flops: float  # of training, exactly counted
    seq: int
    steps: int
    batch: int  # tokens
    lr: float
    budget: float = 0.0  # the iso-FLOP budget that it belongs to
    number: int = 0
    parent: int | None = None
    fork: int = 0

    @property
    def label(self) -> str:
        return f"{short(self.n)} parameters, {short(self.d)} tokens"


def plan(ladder: Ladder, spec: RunSpec) -> list[LadderRun]:
    """All runs but the holdout, the dearest shape first; a trunk comes before its branches."""
    groups = [
        runs
        for seq in ladder.seq or (spec.data.seq,)
        for model in models(ladder, spec.model, seq)
        if (runs := runs_of_shape(ladder, spec, model, seq))
    ]
    if not groups:
        low, high = ladder.tokens_per_param
        raise SpecError(f"the ladder has no run: no size has {low:g} to {high:g} tokens a parameter in any budget")
    if ladder.holdout and (count := sum(map(len, groups))) < FEWEST_FOR_HOLDOUT:
        raise SpecError(
            f"{count} runs predict no holdout: the law has 5 parameters; at least {FEWEST_FOR_HOLDOUT} runs do"
        )
    found: list[LadderRun] = []
    for runs in sorted(groups, key=lambda runs: -runs[0].flops):
        first = len(found)
        for number, run in enumerate(runs, first):
            found.append(replace(run, number=number, parent=first if run.fork else None))
    return found


def models(ladder: Ladder, base: ModelSpec, seq: int) -> list[ModelSpec]:
    """The shape nearest to every wanted size, once each."""
    most = 3 * max(ladder.params)
    every = family(base.vocab, seq, ladder.min_layers)
    shapes = [shape for shape in every if shape.n_no_embed < most] or every[:1]
    known = [shape_like(base, shape.model, seq) for shape in shapes]
    chosen = {}
    for want in ladder.params:
        near = min(known, key=lambda model: size_distance(size_of(model, ladder.count), want))
        if size_distance(size_of(near, ladder.count), want) > math.log(1.5):
            sizes = [size_of(model, ladder.count) for model in known]
            raise SpecError(
                f"params = {want:g}: with a vocabulary of {base.vocab} shapes have {min(sizes):.3g} to "
                f"{max(sizes):.3g} parameters ({ladder.count})"
            )
        alike = [one for one in known if size_distance(size_of(one, ladder.count), size_of(near, ladder.count)) < NEAR]
        best = min(alike, key=lambda model: abs(math.log(model.hidden / model.layers / USUAL)))
        chosen[best.params] = best
    return [chosen[size] for size in sorted(chosen)]


def size_distance(size: float, want: float) -> float:
    return abs(math.log(size / want))


def size_of(model: ModelSpec, count: str) -> int:
    return model.params if count == "total" else model.params - model.embedding_params


def shape_like(base: ModelSpec, shape: ModelSpec, seq: int) -> ModelSpec:
    """The base model (its vocabulary, norms, experts, …) in the proportions of `shape`."""
    keys: dict[str, Any] = {key: getattr(shape, key) for key in SHAPE_KEYS}
    if base.experts:
        keys["expert_ffn"] = 16 * max(1, round(base.expert_ffn * shape.hidden / base.hidden / 16))
    return base.replace(**keys, preset="", context=max(seq, base.context))


def runs_of_shape(ladder: Ladder, spec: RunSpec, model: ModelSpec, seq: int) -> list[LadderRun]:
    """Of every budget, the longest first; those of a trunk share batch, rate and warm-up."""
    per_token = model_flops_per_token(model, seq)
    wanted = [(flops, flops / per_token) for flops in ladder.flops] or [(0.0, tokens) for tokens in ladder.tokens]
    low, high = ladder.tokens_per_param
    size = size_of(model, ladder.count)
    wanted = [(budget, d) for budget, d in wanted if low <= d / size <= high and d >= ladder.min_tokens]
    if not wanted:
        return []
    if ladder.schedule == "cosine":
        return [run_of(ladder, spec, model, seq, *one, settings=one[1]) for one in sorted(wanted, reverse=True)]
    middle = math.exp(math.fsum(math.log(d) for _, d in wanted) / len(wanted))
    runs = [run_of(ladder, spec, model, seq, *one, settings=middle) for one in sorted(wanted, reverse=True)]
    trunk = runs[0]
    warmup = max(1, min(100, runs[-1].steps // 10))
    shared = {"optim.schedule": "wsd", "optim.decay_ratio": ladder.decay_ratio, "optim.warmup": warmup}
    runs = [replace(run, overrides={**run.overrides, **shared}) for run in runs]
    optim = spec.optim.replace(schedule="wsd", decay_ratio=ladder.decay_ratio, warmup=warmup)
    return [
        run if run.steps == trunk.steps else replace(run, fork=optim.replace(steps=run.steps).steps_at_peak)
        for run in runs
    ]


def run_of(
    ladder: Ladder, spec: RunSpec, model: ModelSpec, seq: int, budget: float, tokens: float, settings: float
) -> LadderRun:
    """`settings`: the tokens for which rules give the batch and the learning rate."""
    bare = model.params - model.embedding_params
    lr = ladder.lr or min(ladder.max_lr, rules.learning_rate(bare, settings).value * ladder.lr_factor)
    micro_batch, sequences = batch_of(spec, (ladder.batch_tokens or rules.batch_tokens(settings).value) / seq)
    batch = sequences * seq
    steps = max(FEWEST_STEPS, round(tokens / batch))
    keys = (*SHAPE_KEYS, "context", *(("expert_ffn",) if model.experts else ()))
    overrides: Point = {f"model.{key}": getattr(model, key) for key in keys} | {
        "data.seq": seq,
        "data.micro_batch": micro_batch,
        "data.global_batch": sequences,
        "optim.steps": steps,
        "optim.lr": float(f"{lr:.4g}"),
        "optim.schedule": "cosine",
        "log.eval_every": 0,  # after the last step only
        "log.eval_batches": eval_batches(spec, micro_batch * seq),
    }
    d = steps * batch
    return LadderRun(
        overrides, model.params, bare, d, model_flops_per_token(model, seq) * d, seq, steps, batch,
        overrides["optim.lr"], budget,
    )  # fmt: skip


def batch_of(spec: RunSpec, wanted: float) -> tuple[int, int]:
    """Sequences of a micro-batch and of a step: near to `wanted`, and such that the layout divides it."""
    ranks = spec.parallel.dp_replicate * spec.parallel.dp_shard
    micro_batch = max(1, min(spec.data.micro_batch, round(wanted / ranks)))
    return micro_batch, micro_batch * ranks * max(1, round(wanted / (micro_batch * ranks)))


def eval_batches(spec: RunSpec, micro_batch_tokens: int) -> int:
    """Such that every run of a ladder is held to as many tokens as the base spec says, whatever its micro-batch."""
    return -(-spec.log.eval_batches * spec.data.micro_batch * spec.data.seq // micro_batch_tokens)


# --- reading ---------------------------------------------------------------------------------------------


def as_list(value: Any, key: str, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise SpecError(f"{where}: {key} is a list, e.g. {key} = [{value}]")
    return value


def number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{where}: {key} has {value!r}; it must be a number above 0")
    return float(value)


def text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{where}: {key} = {value!r} must be a text")
    return value


def read_holdout(value: Any, where: str) -> Holdout:
    known = [one.name for one in fields(Holdout)]
    if not isinstance(value, dict) or "flops" not in value:
        raise SpecError(f"{where}: holdout is a table with flops, e.g. holdout = {{ flops = 1e17 }}")
    for key in value:
        if key not in known:
            raise SpecError(f"{where}: unknown key holdout.{key}{did_you_mean(key, known)}")
    return Holdout(**{key: number(one, f"holdout.{key}", where) for key, one in value.items()})
