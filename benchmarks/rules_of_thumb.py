"""The rules of thumb of the course's cheat sheet, measured on this machine.

    python benchmarks/rules_of_thumb.py [--save]

What `lmworks learn cheatsheet --measure` does. `--save` also writes the copy that the package shows where nobody has
measured (src/lmworks/learn/rules_of_thumb.json).
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_result

from lmworks.learn.rules_of_thumb import measure

COPY = Path(__file__).parent.parent / "src/lmworks/learn/rules_of_thumb.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and the package's copy")
    arguments = parser.parse_args()
    result = measure(lambda line: print(line, flush=True))
    for rule, found in result["rules"].items():
        print(f"{rule}: {found['about']}")
        for row in found["rows"]:
            print(f"  {row}")
    if arguments.save:
        path = write_result("rules_of_thumb", result)
        shutil.copyfile(path, COPY)
        print(path)


if __name__ == "__main__":
    main()
