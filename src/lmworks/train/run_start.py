"""The first things a run writes: its resolved spec, and what the planner says of it."""

from __future__ import annotations

import json
from pathlib import Path

from ..plan.devices.machine import Machine
from ..plan.predict import predict
from ..record import RunFolder
from ..spec import RunSpec, SpecError
from ..spec.files import write_whole


def create_run_folder(run_dir: str | Path, spec: RunSpec, machine: Machine | None) -> None:
    try:
        prediction = predict(spec, machine).to_dict()
    except SpecError as error:  # no number is better than a made-up one
        prediction = {"params": spec.model.params, "notes": [str(error)]}
    folder = RunFolder.create(run_dir, spec)
    write_whole(folder.prediction_path, json.dumps(prediction, indent=2))
