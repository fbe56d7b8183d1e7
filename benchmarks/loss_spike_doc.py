"""Run the commands of docs/runbooks/loss-spike.md, in order, and put what they print under them.

python benchmarks/loss_spike_doc.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from goodput_doc import BLOCKS, ROOT, bash

PAGE = ROOT / "docs" / "runbooks" / "loss-spike.md"


def printed(commands: str, folder: Path) -> str:
    """Without the name of the folder that it ran in."""
    return re.sub(re.escape(str(folder)) + "/", "", bash(commands, folder))


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for needed in ("configs", "benchmarks"):
            (folder / needed).symlink_to(ROOT / needed)
        page = BLOCKS.sub(
            lambda block: f"```sh\n{block['commands']}```\n\n```text\n{printed(block['commands'], folder)}\n```", page
        )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
