"""Sections of a spec: frozen dataclasses whose fields carry their range, choices and meaning.

A section is valid by construction. Types and ranges are checked field by field, then `check` looks at
combinations; both hold however the object is made (TOML, override, Python), and every message names
the key as the user writes it, e.g. `optim.lr`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from .errors import SpecError, did_you_mean, near_keys, near_names, suggestion


def opt(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field with a default, a one-line meaning and optional limits. A mapping default is copied."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices}
    if isinstance(default, type | dict | list):
        factory = default if isinstance(default, type) else default.copy
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


class Bound(NamedTuple):
    holds: Callable[[Any, Any], bool]
    limit: float
    words: str


class Rule(NamedTuple):
    """What a field of a section may be."""

    name: str
    key: str  # as the user writes it
    hint: Any
    choices: tuple[str, ...] | None
    bounds: tuple[Bound, ...]


COMPARISONS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


@functools.cache
def field_rules(cls: Any) -> list[Rule]:
    """Worked out once: a run has some 300 fields, and is made anew with every change of one."""
    found = []
    for field in dataclasses.fields(cls):
        limits = [(field.metadata.get(name), *comparison) for name, comparison in COMPARISONS.items()]
        bounds = tuple(Bound(holds, limit, words) for limit, holds, words in limits if limit is not None)
        hint, choices = field_types(cls)[field.name], field.metadata.get("choices")
        found.append(Rule(field.name, cls.key(field.name), hint, choices, bounds))
    return found


class Section:
    """Base of every section: validates itself when constructed. `section` is its dotted path in a spec."""

    section: ClassVar[str] = ""
    given: dict[str, Any]  # the fields as they were given, before anything was derived from them

    def __post_init__(self) -> None:
        given = dict(vars(self))
        object.__setattr__(self, "given", given)
        for rule in field_rules(type(self)):  # type: ignore[arg-type]
            value = coerce(rule.key, rule.hint, given[rule.name])
            if value is not given[rule.name]:
                object.__setattr__(self, rule.name, value)
            check_range(rule, value)
        self.check()

    def check(self) -> None:
        """Fill derived fields with `derive` and refuse combinations that cannot work."""

    @classmethod
    def key(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name

    def derive(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def with_derived(self, name: str, value: Any) -> Self:
        """A copy with a field filled in by the section above."""
        section = copy.copy(self)
        section.derive(name, value)
        return section

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from parsed TOML."""
        if not isinstance(data, Mapping):
            raise SpecError(f"{cls.section or 'spec'}: expected a table, got {data!r}")
        check_known_keys(cls, data, cls.dotted_keys())
        return cls(**data)

    @classmethod
    @functools.cache
    def dotted_keys(cls) -> Mapping[str, dataclasses.Field[Any]]:
        """Every key as the user writes it, e.g. `optim.lr`; those of the sections within are among them."""
        found: dict[str, dataclasses.Field[Any]] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            inner = field_types(cls)[field.name]  # type: ignore[arg-type]
            found |= inner.dotted_keys() if is_section(inner) else {cls.key(field.name): field}
        return types.MappingProxyType(found)

    def to_dict(self) -> dict[str, Any]:
        """As TOML and JSON have it."""
        return {
            field.name: value.to_dict()
            if isinstance(value, Section)
            else list(value)
            if type(value) is tuple
            else value
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            for value in [getattr(self, field.name)]
        }

    def replace(self, **changes: Any) -> Self:
        """As if it had been written with these changes: what follows from them is derived anew."""
        return type(self)(**{**self.given, **changes})


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins; tables are merged key by key."""
    result = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both_tables else value
    return result


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def check_known_keys(cls: type[Section], data: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Name the first key that is none of this section's, or of one within it; `keys` are all that there are."""
    hints = {rule.name: rule.hint for rule in field_rules(cls)}  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in hints:
            near = meant(name, value, sorted(hints), keys)
            raise SpecError(f"unknown key '{cls.key(name)}'{suggestion(near) or did_you_mean(name, hints)}")
        if is_section(hints[name]) and isinstance(value, Mapping):
            check_known_keys(hints[name], value, keys)


def meant(name: str, value: Any, here: Sequence[str], keys: Iterable[str]) -> list[str]:
    """What an unknown key may stand for. A key of another section goes by its whole name, e.g. optim.lr for lr."""
    if isinstance(value, Mapping):  # a section
        return near_names(name, here) or near_keys(leaf(value), keys)
    elsewhere = near_keys(name, keys)
    exact = any(key.endswith(f".{name}") for key in elsewhere)
    return elsewhere if exact else near_names(name, here) or elsewhere


def leaf(table: Mapping[str, Any]) -> str:
    """The last part of the first key in it: lr of {"lr": 1}."""
    for name, value in table.items():
        return leaf(value) if isinstance(value, Mapping) else name
    return ""


NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}


def coerce(key: str, hint: Any, value: Any) -> Any:
    """Check `value` against the annotated type. A table may become a section, an int a float, and a float that is
    a whole number (1e3) an int; nothing else bends.
    """
    if hint is Any or (type(value) is hint and (hint is str or hint is bool)):
        return value
    origin = typing.get_origin(hint) or hint
    if is_section(origin):
        return value if isinstance(value, origin) else origin.from_dict(value)
    if origin is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise SpecError(f"{key} is out of range: it does not fit in 64 bits")
    if origin is float and fits(value, int):
        value = float(value)
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if not fits(value, origin):
        single = origin in (list, tuple) and isinstance(value, str | int | float)
        form = f", e.g. {key}='{json.dumps([value])}'" if single else ""
        raise SpecError(f"{key} must be {NAMES[origin]}{form}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{key} = {value} is not a finite number")
    if origin is dict:
        _, item_type = typing.get_args(hint)
        return {name: coerce(f"{key}.{name}", item_type, item) for name, item in value.items()}
    if origin is list:
        (item_type,) = typing.get_args(hint)
        return [coerce(f"{key}[{index}]", item_type, item) for index, item in enumerate(value)]
    if origin is tuple:  # of any length: a list where a section must be hashable
        return tuple(coerce(f"{key}[{index}]", typing.get_args(hint)[0], item) for index, item in enumerate(value))
    return value


def fits(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check_range(rule: Rule, value: Any) -> None:
    if rule.choices and value not in rule.choices:
        raise SpecError(f"{rule.key} = {value!r} is not one of: {', '.join(rule.choices)}")
    if not rule.bounds or not fits(value, int | float):
        return
    if not all(bound.holds(value, bound.limit) for bound in rule.bounds):
        allowed = " and ".join(f"{bound.words} {bound.limit:g}" for bound in rule.bounds)
        raise SpecError(f"{rule.key} = {value} is out of range: it must be {allowed}")
