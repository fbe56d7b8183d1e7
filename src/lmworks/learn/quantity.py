"""Quantities as people write and read them: 80 GB, 74.5 GiB, 25 %, 1.2 s, 2.9B."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..record.formatting import binary_bytes, duration, short
from ..spec.errors import SpecError
from ..spec.units import BYTES

SIZES = BYTES | {"BYTE": 1, "BYTES": 1}
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": SIZES,
    "bytes/s": {f"{name}/S": size for name, size in SIZES.items()} | {"": 1},
    "seconds": {
        "": 1, "US": 1e-6, "\u039cS": 1e-6, "MS": 1e-3, "S": 1, "MIN": 60, "H": 3600, "HOURS": 3600, "D": 86_400,
        "DAYS": 86_400,
    },
    "share": {"": 1, "%": 0.01},
}  # fmt: skip
COUNT = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}  # of any other unit
EXAMPLES = {
    "bytes": "80e9, 80 GB or 74.5 GiB", "bytes/s": "300e9, 300 GB/s or 280 GiB/s", "seconds": "0.012, 12 ms or 3.5 h",
    "share": "0.25 or 25 %",
}  # fmt: skip
NUMBER = re.compile(r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?(.*)", re.IGNORECASE)


def parse_quantity(text: str, unit: str) -> float:
    """In `unit`, which is one of UNITS or the name of what is counted."""
    found = NUMBER.fullmatch("".join(text.split()))
    known = UNITS.get(unit) or COUNT | {f"{prefix}{unit.upper()}": size for prefix, size in COUNT.items()}
    if not found or found[3].upper() not in known:
        raise SpecError(f"{text!r} is not an answer in {unit}; write it like {example_of(unit)}")
    return float(found[1].replace(",", "") + (found[2] or "")) * known[found[3].upper()]


def example_of(unit: str) -> str:
    return EXAMPLES.get(unit, "52, 2.9B or 2.9e9")


def show_quantity(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return f"{with_prefix(value, 'B')} ({binary_bytes(value)})"
        case "bytes/s":
            return with_prefix(value, "B/s")
        case "share":
            return f"{100 * value:.3g} %"
        case "seconds":
            long = ((86_400, "days"), (3600, "hours"))
            return next((f"{value / size:.3g} {name}" for size, name in long if value >= 2 * size), duration(value))
    return f"{short(value).replace('G', 'B')} {unit}"  # as parameters and tokens are counted


def with_prefix(value: float, unit: str) -> str:
    """4.79 GB"""
    text = short(value)
    digits = text.rstrip("kMGTPE")
    return f"{digits} {text[len(digits) :]}{unit}"
