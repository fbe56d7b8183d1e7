"""The stages there are, by name, and a pipeline's list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ..spec.errors import SpecError, did_you_mean
from .documents import Stage

MODULES: dict[str, str] = {
    "normalise": "normalise",
    **dict.fromkeys(("gopher_quality", "gopher_repetition"), "gopher"),
    **dict.fromkeys(("c4", "c4_paragraphs", "fineweb"), "web_rules"),
    **dict.fromkeys(("language", "code_language"), "languages"),
    **dict.fromkeys(("code", "license"), "code_rules"),
    **dict.fromkeys(("exact", "lines", "minhash"), "dedup"),
    "decontaminate": "decontaminate",
    **dict.fromkeys(("pii", "secrets"), "pii"),
    "quality": "quality",
    "syntax": "syntax",
}
"""Name → module of this room whose `STAGES` has it; imported only where a pipeline uses it."""


def stage_class(name: str) -> type[Stage]:
    if name not in MODULES:
        raise SpecError(f"unknown stage {name!r}{did_you_mean(name, MODULES)}")
    stages: Sequence[type[Stage]] = import_module(f".{MODULES[name]}", __package__).STAGES
    return next(stage for stage in stages if stage.name == name)


def make_stage(entry: str | Mapping[str, Any]) -> Stage:
    """`"gopher"`, or a table with its keys: `{stage = "gopher", min_words = 30}`."""
    table = {"stage": entry} if isinstance(entry, str) else dict(entry)
    name = table.pop("stage", None)
    if not isinstance(name, str):
        raise SpecError(f'a stage needs its name: stage = "NAME"; known: {", ".join(sorted(MODULES))}')
    return stage_class(name).from_dict(table)
