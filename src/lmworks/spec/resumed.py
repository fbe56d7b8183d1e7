"""What of its spec a run may change when it is resumed (`resumed_keys.py`); everything else is refused by key.

A resumed run goes on where it stood: with the same weights and states, at the same place in the same order of the same
data. What those follow from must stay as it was. What only says how, where and how long the run goes on may change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .resumed_keys import MAY_CHANGE
from .run import RunSpec


def may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def refused_changes(saved: Mapping[str, Any], spec: RunSpec, section: str = "") -> list[str]:
    """'key = new, was old' of everything in `spec` that a run saved with `saved` (a spec as JSON) must not change.

    Of one `section` only, where one is named. A key that was not there when it was saved had what follows today from
    the others: its default, or what is derived from them.
    """
    old, new, usual = flat(saved), flat(spec.to_dict()), flat(RunSpec.from_dict(known_part(saved)).to_dict())
    found = []
    for key in sorted(old.keys() | new.keys()):
        if may_change(key) or not key.startswith(section):
            continue
        before, now = (table.get(key, usual.get(key)) for table in (old, new))
        if before != now:
            found.append(f"{key} = {shown(now)}, was {shown(before)}")
    return found


def known_part(saved: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Without keys that there are no more."""
    known = RunSpec.dotted_keys()
    found = {}
    for key, value in saved.items():
        name = f"{prefix}{key}"
        if name in known:
            found[key] = value
        elif isinstance(value, Mapping) and any(one.startswith(f"{name}.") for one in known):
            found[key] = known_part(value, f"{name}.")
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 1e-3, …}, as JSON has it. Of a mixture its weights, in their order: its folders may have moved."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if name == "data.mix":
            found[name] = list(value.values()) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    return "not there" if value is None else json.dumps(value)
