"""Many drills, one after another: one fleet serves those of the same shape."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.html_page import check_output_folder
from ..spec import LMWorksError, SpecError
from ..spec.errors import did_you_mean
from .drills import DRILLS
from .incident import Check, Drill, Moment, Report, run_drill
from .leftovers import end_marked
from .local_fleet import LocalFleet, train_model

BY_NAME = {drill.name: drill for drill in DRILLS}


def choose(name: str) -> list[Drill]:
    """One, several with commas between them, or all."""
    if name == "all":
        return list(DRILLS)
    unknown = next((one for one in name.split(",") if one not in BY_NAME), None)
    if unknown is not None:
        raise SpecError(f"there is no drill {unknown!r}{did_you_mean(unknown, [*BY_NAME, 'all', 'list', 'chaos'])}")
    return [BY_NAME[one] for one in name.split(",")]


def run_drills(
    drills: Sequence[Drill],
    out: Path,
    rules: Mapping[str, Any] | None,
    on_moment: Callable[[Moment], None],
    on_report: Callable[[Report], None],
) -> list[Report]:
    check_output_folder(out)
    model = train_model(out / "model")
    reports: list[Report] = []
    fleet: LocalFleet | None = None
    try:
        for drill in drills:
            folder = out / drill.name
            shutil.rmtree(folder, ignore_errors=True)
            if fleet is None or fleet.shape != drill.shape or fleet.supervisor is None or not fleet.healthy():
                if fleet is not None:
                    fleet.stop()
                fleet = LocalFleet(folder / "fleet", model, drill.shape)
            on_moment(Moment(0.0, drill.name, "drill"))
            try:
                report = run_drill(drill, fleet, folder, rules, on_moment)
            except LMWorksError as error:  # of this drill; the others are run
                fleet.stop()
                failed = Check("the drill ran", False, "to its end", str(error))
                report = Report(drill.name, drill.what, [failed], [], [], {}, 0.0, {})
            reports.append(report)
            on_report(report)
    finally:
        if fleet is not None:
            fleet.stop()
        end_marked()
    return reports
