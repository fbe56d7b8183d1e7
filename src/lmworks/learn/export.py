"""A class repository: a workspace, a workflow that grades each push, files for Gradescope and GitHub Classroom."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..spec.errors import SpecError
from .exercise import Exercise, exercises
from .grade import POINTS
from .workspace import MARKER, Workspace

PIP = "python -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt"

IGNORED = """__pycache__/
runs/
.learn/*
!.learn/.gitkeep
"""

WORKFLOW = """name: Autograding Tests
on: [push, workflow_dispatch]
permissions:
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
      - name: Install
        run: {pip}
      - name: Grade
        run: {grade} --gradescope results.json --csv results.csv --require-all
      - name: Keep the results
        if: always()
        uses: actions/upload-artifact@v4
        with:
          name: results
          path: |
            results.json
            results.csv
"""

SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image; requirements.txt lies beside it in the zip file.
set -e
apt-get update
apt-get install -y python3 python3-pip python3-venv
python3 -m venv /autograder/venv
cd "$(dirname "$0")"
/autograder/venv/bin/{pip}
"""

RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission: submission/ and results/ lie beside it.
cd "$(dirname "$0")"
PATH="$PWD/venv/bin:$PATH"
exec {grade}
"""

NOTE = """
## This class

Each push is graded; the result is in the tab "Actions". The same, here: `{grade}`
"""


def export_class(folder: Path, graded: Sequence[Exercise], install: str) -> Workspace:
    """`install`: what pip takes to have LMWorks."""
    if "\n" in install:
        raise SpecError("--install: one line, as pip takes it in a requirements file")
    workspace = Workspace.create(folder)
    chosen = "" if len(graded) == len(exercises()) else "".join(f" --exercise {one.id}" for one in graded)
    grade = f"lmworks learn grade{chosen}"
    requirements = f"{install}\n"
    files = {
        ".gitignore": IGNORED,
        f"{MARKER}/.gitkeep": "",
        "requirements.txt": requirements,
        ".github/workflows/classroom.yml": WORKFLOW.format(pip=PIP, grade=f"{grade} ."),
        ".github/classroom/autograding.json": json.dumps({"tests": classroom_tests(graded)}, indent=2) + "\n",
        "autograder/setup.sh": SETUP.format(pip=PIP),
        "autograder/run_autograder": RUN.format(grade=f"{grade} --gradescope results/results.json submission"),
        "autograder/requirements.txt": requirements,
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in ("setup.sh", "run_autograder"):
        (folder / "autograder" / name).chmod(0o755)
    readme = folder / "README.md"
    readme.write_text(readme.read_text() + NOTE.format(grade=f"{grade} ."))
    return workspace


def classroom_tests(graded: Sequence[Exercise]) -> list[dict[str, object]]:
    """Of .github/classroom/autograding.json: a test passes where its command exits with 0."""
    return [
        {
            "name": one.about,
            "setup": PIP,
            "run": f"lmworks learn check {shlex.quote(one.id)} --json",
            "input": "",
            "output": "",
            "comparison": "included",
            "timeout": 10,  # minutes
            "points": POINTS,
        }
        for one in graded
    ]
