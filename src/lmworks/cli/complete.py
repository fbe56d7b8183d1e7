"""Shell completion: presets, accelerators and clusters, keys of a spec and their values.

`lmworks --install-completion` sets it up. Nothing here loads torch: a shell asks at every keystroke.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from ..spec.engine import EngineSpec
from ..spec.hardware import catalogue, spelling
from ..spec.presets import PRESETS
from ..spec.run import RunSpec

Keys = Mapping[str, "dataclasses.Field[Any]"]
Completions = list[tuple[str, str]]  # value, description


def sources(incomplete: str) -> Completions:
    """Presets, and files beside them. Where no preset fits, nothing: then shells complete paths, and do it better."""
    presets = [(name, "preset") for name in PRESETS if name.startswith(incomplete)]
    return [*presets, *((path, "") for path in paths(incomplete))] if presets else []


def paths(incomplete: str) -> list[str]:
    """Folders and TOML files here. A preset has no slash in its name, so neither has what is beside it."""
    here = sorted(path for path in Path().iterdir() if path.name.startswith(incomplete or path.name.lstrip(".")))
    return [f"{path.name}/" if path.is_dir() else path.name for path in here if path.is_dir() or path.suffix == ".toml"]


def gpus(incomplete: str) -> Completions:
    """Accelerators by their shortest name."""
    shortest = {(gpu.alias or spelling(name)).split()[0]: name for name, gpu in catalogue().items()}
    return [(short, name) for short, name in shortest.items() if short.startswith(incomplete.lower())]


def clusters(incomplete: str) -> Completions:
    """COUNTxGPU: the counts as they were typed, and what fits after them."""
    counts, typed = re.fullmatch(r"((?:[0-9]+x)*)(.*)", incomplete, re.DOTALL).groups()  # type: ignore[union-attr]
    if typed.isdecimal():
        counts, typed = f"{incomplete}x", ""
    return [(f"{counts}{short}", name) for short, name in gpus(typed)]


def overrides(ctx: typer.Context, incomplete: str) -> Completions:
    return keys_or_values(RunSpec.dotted_keys(), ctx.params.get("overrides") or (), incomplete)


def engine_overrides(ctx: typer.Context, incomplete: str) -> Completions:
    return keys_or_values(EngineSpec.dotted_keys(), ctx.params.get("overrides") or (), incomplete)


def models_and_engine(incomplete: str) -> Completions:
    """What `serve` takes: models, then changes to the engine."""
    return [*sources(incomplete), *keys_or_values(EngineSpec.dotted_keys(), (), incomplete)]


def keys_or_values(keys: Keys, before: list[str] | tuple[str, ...], incomplete: str) -> Completions:
    """`opt` → `optim.…=`, and `optim.schedule=` → its values. bash has an equals sign as a word of its own."""
    if len(before) >= 2 and before[-1] == "=":
        return [(value, "") for value in values(before[-2], keys) if value.startswith(incomplete)]
    key, equals, typed = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", "") for value in values(key, keys) if value.startswith(typed)]
    found = [key for key in keys if key.startswith(incomplete)]
    sections = list(dict.fromkeys(key.partition(".")[0] for key in found))
    if "." not in incomplete and len(sections) > 1:  # first which section: all keys at once would fill a screen
        return [(f"{name}=", describe(keys[name])) if name in keys else (f"{name}.", "section") for name in sections]
    return [(f"{key}=", describe(keys[key])) for key in found]


def values(key: str, keys: Keys) -> Iterator[str]:
    field = keys.get(key)
    if key == "model.preset":
        yield from PRESETS
    elif key == "cluster.gpu":
        yield from (short for short, _ in gpus(""))
    elif field is not None:
        yield from field.metadata["choices"] or (("true", "false") if field.type == "bool" else ())


def describe(field: dataclasses.Field[Any]) -> str:
    """With the default. On one line of a terminal: what is longer is broken on its way to the shell."""
    default = "" if field.default in (dataclasses.MISSING, "") else f" ({field.default})"
    return textwrap.shorten(f"{field.metadata['doc']}{default}", 76, placeholder=" …")
