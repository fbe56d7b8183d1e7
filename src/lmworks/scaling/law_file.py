"""A fitted law on disk: JSON or TOML with `method` and `params`; what `scaling fit --out` writes also has its error.

Published laws are in constants/, under their names, with their sources.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import NoSuchData, SpecError, did_you_mean
from .fitting import FittedLaw
from .laws import LAWS, law_of
from .optimum import FlopRule

CONVENTIONS = ("total", "no-embed")


def law_to_dict(fitted: FittedLaw, digits: int = 6) -> dict[str, Any]:
    """`draws`: θ of the replicates, logarithms of coefficients, in the order of `theta_names`."""

    def short(values: Any) -> Any:
        return [float(f"{value:.{digits}g}") for value in values]

    return {
        "method": fitted.law.name,
        "formula": fitted.law.formula,
        "source": fitted.source,
        "params": fitted.params,
        "n_convention": fitted.convention,
        "level": fitted.level,
        "ranges": {name: list(limits) for name, limits in fitted.ranges.items()},
        "flops_per_token": asdict(fitted.rule),
        "warnings": list(fitted.warnings),
        "residuals": short(np.quantile(fitted.residuals, np.linspace(0.005, 0.995, 41)))
        if len(fitted.residuals)
        else [],
        "theta_names": list(fitted.law.parameters),
        "draws": [short(draw) for draw in fitted.draws],
        "spread": fitted.spread,
    }


def constants() -> dict[str, Path]:
    folder = Path(str(files("lmworks.scaling") / "constants"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_law(source: str) -> FittedLaw:
    """A name of constants/, or a path."""
    path = constants().get(source, Path(source))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not path.exists():
            raise NoSuchData(f"{source}: is no file and no published law{did_you_mean(source, constants())}") from None
        raise SpecError(f"{source}: cannot be read: {error}") from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise SpecError(f"{source}: {error}") from None
    return law_from_dict(data, source)


def law_from_dict(data: Any, source: str) -> FittedLaw:
    if not isinstance(data, Mapping) or not isinstance(data.get("params"), Mapping) or "method" not in data:
        raise SpecError(f"{source}: a law has `method` (e.g. chinchilla) and `params` (E, A, B, alpha, beta)")
    if data["method"] not in LAWS:
        raise SpecError(
            f"{source}: method {data['method']!r} predicts no loss{did_you_mean(str(data['method']), LAWS)}"
        )
    law = law_of(data["method"])
    names = law.natural(np.ones(len(law.parameters))).keys()
    params = data["params"]
    for name in names:
        value = params.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise SpecError(f"{source}: params.{name} is {value!r}; {law.formula} needs a number above 0")
    convention = data.get("n_convention", "total")
    if convention not in CONVENTIONS:
        raise SpecError(f"{source}: n_convention is {convention!r}; it can be {' or '.join(CONVENTIONS)}")
    draws = np.array(data.get("draws") or np.zeros((0, len(law.parameters))), dtype=float)
    if draws.ndim != 2 or draws.shape[1] != len(law.parameters):
        raise SpecError(f"{source}: draws have {len(law.parameters)} numbers each, {', '.join(law.parameters)}")
    return FittedLaw(
        law,
        law.theta({name: float(params[name]) for name in names}),
        draws,
        float(data.get("spread", 1.0)),
        np.array(data.get("residuals", []), dtype=float),
        {name: (float(low), float(high)) for name, (low, high) in data.get("ranges", {}).items()},
        FlopRule(**data.get("flops_per_token", {})),
        convention,
        float(data.get("level", 0.9)),
        str(data.get("source", source)),
        tuple(data.get("warnings", ())),
    )
