"""The space of a sweep: which keys of the spec take which values.

[optim.lr]
range = [1e-4, 1e-2]     # both ends belong to it
log = true
points = 5               # of an enumeration; a sampler takes the whole range

[optim.schedule]
values = ["cosine", "wsd"]

[optim.decay_ratio]      # only where the schedule has it
values = [0.1, 0.3]
when = {"optim.schedule" = "wsd"}
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..spec import RunSpec, SpecError
from ..spec.errors import did_you_mean
from ..spec.schema import check_known_keys

Point = dict[str, Any]  # dotted key → value

FIELDS = ("values", "range", "log", "step", "points", "when")
MOST_POINTS = 100_000


@dataclass(frozen=True)
class Dimension:
    """One key: a list of values, or a range with both of its ends."""

    key: str
    values: tuple[Any, ...] = ()
    range: tuple[float, float] | None = None  # of two integers: integers
    log: bool = False
    step: float | None = None  # between neighbours of a range
    points: int = 0  # of a range, evenly spaced (by factors with `log`)
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # key → values with which this one matters

    @classmethod
    def of(cls, key: str, table: Mapping[str, Any]) -> Self:
        for name in table:
            if name not in FIELDS:
                raise SpecError(f"{key}: unknown field '{name}'{did_you_mean(name, FIELDS)}")
        if ("values" in table) == ("range" in table):
            raise SpecError(f"{key}: give either values = [...] or range = [low, high]")
        if "values" in table:
            return cls.of_values(key, table)
        return cls.of_range(key, table)

    @classmethod
    def of_values(cls, key: str, table: Mapping[str, Any]) -> Self:
        values = table["values"]
        if not isinstance(values, list) or not values:
            raise SpecError(f"{key}: values = {values!r} must be a list with at least one value")
        if alone := [name for name in ("log", "step", "points") if name in table]:
            raise SpecError(f"{key}: {alone[0]} belongs to a range, and this key has values")
        for index, value in enumerate(values):
            if value in values[:index]:
                raise SpecError(f"{key}: values has {value!r} twice")
        return cls(key, values=tuple(values), when=conditions(key, table.get("when", {})))

    @classmethod
    def of_range(cls, key: str, table: Mapping[str, Any]) -> Self:
        ends, log, step, points = table["range"], table.get("log", False), table.get("step"), table.get("points", 0)
        if not isinstance(ends, list) or len(ends) != 2 or not all(is_number(end) for end in ends):
            raise SpecError(f"{key}: range = {ends!r} must be two numbers [low, high]")
        low, high = ends
        if not low < high:
            raise SpecError(f"{key}: range = {ends!r} is empty: the first number must be below the second")
        if not isinstance(log, bool):
            raise SpecError(f"{key}: log = {log!r} must be true or false")
        if log and low <= 0:
            raise SpecError(f"{key}: range = {ends!r} with log = true must begin above 0")
        if step is not None and (not is_number(step) or step <= 0 or log):
            why = "goes with log = false; points = N spaces a log range" if log else "must be a number above 0"
            raise SpecError(f"{key}: step = {step!r} {why}")
        if not isinstance(points, int) or isinstance(points, bool) or points == 1 or points < 0:
            raise SpecError(f"{key}: points = {points!r} must be a whole number of at least 2")
        if points and step is not None:
            raise SpecError(f"{key}: step and points both say how a range is divided; give one of them")
        return cls(key, (), (low, high), log, step, points, conditions(key, table.get("when", {})))

    @property
    def integer(self) -> bool:
        """Whether a range holds whole numbers only."""
        return self.range is not None and all(isinstance(end, int) for end in (*self.range, self.step or 0))

    def is_active(self, point: Point) -> bool:
        """Whether this key matters beside those chosen before it."""
        return all(key in point and point[key] in wanted for key, wanted in self.when.items())

    def every_value(self) -> tuple[Any, ...]:
        """In order; a range without a division has none."""
        if self.range is None:
            return self.values
        low, high = self.range
        if self.points:
            return tuple(dict.fromkeys(self.rounded(at) for at in spaced(low, high, self.points, self.log)))
        step = self.step or (1 if self.integer and not self.log else None)
        if step is None:
            raise SpecError(
                f"{self.key}: a sweep runs every point, and range = {list(self.range)} has no division; add points = 5"
                f"{'' if self.log else ' or step = …'}, or sample it with `lmworks tune`"
            )
        count = math.floor((high - low) / step * (1 + 1e-12)) + 1
        if count > MOST_POINTS:
            raise SpecError(f"{self.key}: range = {list(self.range)} has {count:,} values; at most {MOST_POINTS:,}")
        return tuple(self.rounded(low + index * step) for index in range(count))

    def rounded(self, value: float) -> float:
        """Without the last digits of floating-point arithmetic: 0.3 and not 0.30000000000000004."""
        return round(value) if self.integer else float(f"{value:.12g}")

    def to_dict(self) -> dict[str, Any]:
        table: dict[str, Any] = {"values": list(self.values)} if self.range is None else {"range": list(self.range)}
        table |= {name: value for name in ("log", "step", "points") if (value := getattr(self, name))}
        return table | ({"when": {key: list(wanted) for key, wanted in self.when.items()}} if self.when else {})


@dataclass(frozen=True)
class Space:
    """Dimensions, each after those that its condition names."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """A TOML file; errors name it."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"--space {path}: {error.strerror}") from None
        except ValueError as error:
            raise SpecError(f"--space {path} is not valid TOML: {error}") from None
        try:
            return cls.of(table)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """From parsed TOML, with nested or dotted keys, or from `to_dict`."""
        found: dict[str, Mapping[str, Any]] = {}
        for key, fields in entries(table):
            if key in found:
                raise SpecError(f"the space names {key} twice")
            found[key] = fields
        if not found:
            raise SpecError("the space is empty: name a key, e.g. optim.lr.values = [1e-3, 3e-3]")
        for key in found:
            check_key(key)
        dimensions = {key: Dimension.of(key, fields) for key, fields in found.items()}
        for dimension in dimensions.values():
            for key in dimension.when:
                if key not in dimensions:
                    raise SpecError(f"{dimension.key}: when names {key}, which the space does not vary")
        return cls(tuple(in_order(dimensions)))

    @property
    def keys(self) -> list[str]:
        return [dimension.key for dimension in self.dimensions]

    def points(self) -> list[Point]:
        """Every point, the last key varying fastest. A key whose condition does not hold is left out."""
        unconditional = [d.every_value() for d in self.dimensions if not d.when]
        if math.prod(map(len, unconditional)) > MOST_POINTS:
            raise SpecError(f"the space has more than {MOST_POINTS:,} points; sample it with `lmworks tune`")
        points: list[Point] = [{}]
        for dimension in self.dimensions:
            values = dimension.every_value()
            points = list(
                itertools.chain.from_iterable(
                    [{**point, dimension.key: value} for value in values] if dimension.is_active(point) else [point]
                    for point in points
                )
            )
            if len(points) > MOST_POINTS:
                raise SpecError(f"the space has more than {MOST_POINTS:,} points; sample it with `lmworks tune`")
        return points

    def to_dict(self) -> dict[str, Any]:
        return {dimension.key: dimension.to_dict() for dimension in self.dimensions}

    def difference(self, other: Space) -> str:
        """What differs from `other`, for an error; empty where nothing does."""
        mine, theirs = self.to_dict(), other.to_dict()
        for key in [*mine, *theirs]:
            if mine.get(key) != theirs.get(key):
                return f"{key}: {described(mine.get(key))} there, {described(theirs.get(key))} here"
        return ""


def described(fields: Mapping[str, Any] | None) -> str:
    if fields is None:
        return "not in the space"
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())


def entries(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted key, its fields) of nested tables."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if not isinstance(value, Mapping):
            raise SpecError(
                f"{key} = {value!r} is no entry of a space; write {key}.values = [...] or {key}.range = [...]"
            )
        if key in RunSpec.dotted_keys() or value.keys() & {"values", "range"}:
            yield key, value
        else:
            yield from entries(value, f"{key}.")


def check_key(key: str) -> None:
    """As a spec does, with the nearest key that there is."""
    if key in RunSpec.dotted_keys():
        return
    nested: Any = 0
    for part in reversed(key.split(".")):
        nested = {part: nested}
    check_known_keys(RunSpec, nested, RunSpec.dotted_keys())
    raise SpecError(f"{key} is a section of the spec; name one of its keys{did_you_mean('', keys_of(key))}")


def keys_of(section: str) -> list[str]:
    return [key for key in RunSpec.dotted_keys() if key.startswith(f"{section}.")]


def conditions(key: str, table: Any) -> dict[str, tuple[Any, ...]]:
    """`when`: dotted or nested keys, each with a value or a list of them."""
    if not isinstance(table, Mapping):
        raise SpecError(f'{key}: when = {table!r} must be a table, e.g. {{"optim.schedule" = "wsd"}}')
    return {name: tuple(wanted) if isinstance(wanted, list) else (wanted,) for name, wanted in leaves(table)}


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_order(dimensions: Mapping[str, Dimension]) -> Iterator[Dimension]:
    """As written, but each after the keys of its condition."""
    done: set[str] = set()
    left = dict(dimensions)
    while left:
        ready = next((one for one in left.values() if one.when.keys() <= done), None)
        if ready is None:
            raise SpecError(f"the conditions of {' and '.join(left)} depend on each other")
        yield ready
        done.add(ready.key)
        del left[ready.key]


def spaced(low: float, high: float, count: int, log: bool) -> list[float]:
    """Both ends and what lies between; of a log range with four digits, which are easier to read and to repeat."""
    shares = [index / (count - 1) for index in range(count)]
    inner = [
        float(f"{low * (high / low) ** share:.4g}") if log else low + (high - low) * share for share in shares[1:-1]
    ]
    return [low, *inner, high]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
