"""The layouts that are proved against one rank: `layouts.toml`, read by `lmworks prove parity` and the tests."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import SpecError, did_you_mean
from .model import ModelSpec
from .run import RunSpec
from .schema import merge

SECTIONS = ("model", "data", "precision", "parallel", "lora")


@dataclass(frozen=True)
class Tolerance:
    """How far a layout may be from one rank in fp32 (study.rounding has the rest). Wider only with a written cause."""

    loss: float = 1e-6  # |Δ| / |loss|
    gradient: float = 1e-5  # ‖Δ‖ / ‖g‖ of each weight, and of the norm of all
    weights: float = 1e-5  # ‖Δ‖ / ‖w‖ of each after five steps of SGD
    cause: str = ""


# Ends of names whose gradient is zero but for rounding: differences are compared with the size of the whole gradient.
ZERO = ("attention.k.bias",)
ZERO_CAUSE = (
    "without rotary positions a bias of the keys moves all scores of a query alike, and softmax does not see it: its "
    "gradient is zero but for rounding, which is compared with the norm of all gradients"
)


def zero_gradients(model: ModelSpec) -> tuple[str, ...]:
    return ZERO if model.qkv_bias and model.positions != "rope" and not model.qk_norm else ()


@dataclass(frozen=True)
class Layout:
    name: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance()

    def run(self, given: dict[str, Any] | None = None) -> RunSpec:
        """The run that is compared: our small one, or `given` (tables of a spec) laid out the same way."""
        return RunSpec.from_dict(merge(self.start(given), {k: self.sections.get(k, {}) for k in self.kept(given)}))

    def alone(self, given: dict[str, Any] | None = None, dtype: str | None = None) -> RunSpec:
        """The same run on one rank, in the same precision or another."""
        kept = {k: self.sections.get(k, {}) for k in self.kept(given) if k != "parallel"}
        table = merge(self.start(given), kept)
        table["data"] = {**table["data"], "micro_batch": 1}
        if "align" in table:
            table["align"] = {**table["align"], "engine_tp": 1}
        if dtype:  # and everything kept in fp32
            return RunSpec.from_dict({**table, "precision": {"dtype": dtype}})
        return RunSpec.from_dict(merge(table, {"precision": {"reduce": "fp32"}}))

    def start(self, given: dict[str, Any] | None) -> dict[str, Any]:
        base = read()["base"]
        if given is None:
            return merge(base, {"name": self.name})
        sizes = {key: base["data"][key] for key in ("micro_batch", "global_batch")}
        table = {key: value for key, value in given.items() if key not in ("parallel", "cluster", "checkpoint")}
        own = {"optim": base["optim"], "cluster": base["cluster"]}
        return merge({"data": sizes}, merge(table, {**own, "name": self.name}))

    def kept(self, given: dict[str, Any] | None) -> tuple[str, ...]:
        return SECTIONS if given is None else ("precision", "parallel")


@cache
def read() -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "layouts.toml").read_text(encoding="utf-8"))


@cache
def layouts() -> dict[str, Layout]:
    """All of them, by name, in the order of the file."""
    content = read()
    found: dict[str, Layout] = {}
    for entry in content["layout"]:
        name = entry["name"]
        if name in found:
            raise SpecError(f"layouts.toml: two layouts are called {name!r}")
        sections = {key: entry[key] for key in SECTIONS if key in entry and key != "model"}
        model = content["models"][entry.get("model", "dense")]
        tolerance = Tolerance(**entry.get("tolerance", {}))
        if "tolerance" in entry and not tolerance.cause:
            raise SpecError(f"layouts.toml: {name} loosens a tolerance without a cause")
        found[name] = Layout(name, {**sections, "model": model}, tolerance)
    return found


def choose(names: str) -> list[Layout]:
    """`all`, or names with commas between them."""
    known = layouts()
    if names == "all":
        return list(known.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise SpecError(f"--layouts {names!r} names no layout; use `all`, or names with commas between them")
    for name in chosen:
        if name not in known:
            raise SpecError(f"there is no layout {name!r}{did_you_mean(name, known)}; `all` is every one of them")
    return [known[name] for name in chosen]
