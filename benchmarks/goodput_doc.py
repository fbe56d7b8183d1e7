"""Run the commands of docs/goodput.md, in order, and put what they print under them; draw its pictures.

    python benchmarks/goodput_doc.py

Every ```sh block that a ```text block follows is run as it stands, by bash, in a folder with this repository's configs;
its standard output becomes the text block. The kill and the restart in it are real, so the figures differ each time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "goodput.md"
IMAGES = ROOT / "docs" / "images"
BLOCKS = re.compile(r"```sh\n(?P<commands>.*?)```\n\n```text\n.*?```", re.DOTALL)
SLOW_STORAGE = ("--storage-gbs", "100")


def bash(commands: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", commands], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if line.strip())


def draw_intervals(folder: Path, out: Path) -> None:
    """ETTR against the interval, of the clusters in the page's table of slow storage."""
    found = json.loads(bash(" ".join(["lmworks plan reliability --json", *SLOW_STORAGE]), folder))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for one in found:
        minutes = [int(steps) * one["step_s"] / 60 for steps in one["curve"]]
        label = f"{one['gpus']:,} GPUs, {one['saves']}"
        (line,) = axes.plot(minutes, list(one["curve"].values()), marker="o", markersize=3, label=label)
        axes.plot(one["every"] * one["step_s"] / 60, one["mean"], "o", color=line.get_color(), markersize=9)
    axes.set(xscale="log", xlabel="minutes of training between two saves", ylabel="ETTR, simulated")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=110)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "configs").symlink_to(ROOT / "configs")
        page = BLOCKS.sub(
            lambda block: f"```sh\n{block['commands']}```\n\n```text\n{bash(block['commands'], folder)}\n```", page
        )
        bash("lmworks runs show runs/killed --plot", folder)
        shutil.copy(folder / "runs/killed/plots/goodput.png", IMAGES / "goodput.png")
        draw_intervals(folder, IMAGES / "goodput-interval.png")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
