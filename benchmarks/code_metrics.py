"""How large the code is and how far apart its parts are: lines and files by room, three walks, files a change touches.

    python benchmarks/code_metrics.py                 # prints the tables
    python benchmarks/code_metrics.py --record NAME   # and keeps them in results/code_metrics.json under NAME

A walk is what really runs: Python calls inside the package while one batch is trained, one 70B step is predicted and
one request is answered. Its figures: distinct files and functions, *hops*, the calls that enter another file, each
pair of calling and called function counted once, and *calls to other files*, every such call.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, commit

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lmworks"
SMALL = 60  # lines
# What a change of each kind had to touch, told by a name that only this change brought.
CHANGES = {
    "a trait of the model": r"qk_norm",
    "a second trait": r"sliding_window",
    "a third trait": r"shared_experts",
    "a layout": r"dualpipev",
    "a sampler option": r"min_p",
    "a kernel": r"swiglu_fp8",
    "a command": r"\bmesh\.mesh\b|\bdef mesh\(",
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "(top)"


def by_room() -> dict[str, dict[str, int]]:
    rooms: dict[str, dict[str, int]] = {}
    for path in modules():
        room = rooms.setdefault(room_of(path), {"files": 0, "lines": 0})
        room["files"] += 1
        room["lines"] += len(path.read_text(encoding="utf-8").splitlines())
    return rooms


def imported(path: Path) -> Iterator[str]:
    """Dotted names of modules of ours that a file imports."""
    package = ["lmworks", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def importers() -> dict[str, set[str]]:
    """Module → the modules that import it."""
    names = {".".join(["lmworks", *path.relative_to(SOURCE).with_suffix("").parts]): path for path in modules()}
    found: dict[str, set[str]] = {name: set() for name in names if not name.endswith(("__init__", "__main__"))}
    for name, path in names.items():
        for other in imported(path):
            if other in found and other != name:
                found[other].add(name)
    return found


def fragments() -> dict[str, int]:
    single = [name for name, users in importers().items() if len(users) == 1]
    lengths = [len((ROOT / "src" / (name.replace(".", "/") + ".py")).read_text().splitlines()) for name in single]
    return {"one importer": len(single), f"of these under {SMALL} lines": sum(length < SMALL for length in lengths)}


def touched(pattern: str) -> list[str]:
    known = re.compile(pattern)
    return [str(path.relative_to(SOURCE)) for path in modules() if known.search(path.read_text(encoding="utf-8"))]


# --- walks -------------------------------------------------------------------------------------------------


class Walk:
    """Calls inside the package, in this thread, while it is entered."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.hops: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()

    def __enter__(self) -> Walk:
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def see(self, frame: Any, event: str, _argument: object) -> None:
        here = self.place(frame)
        if event != "call" or here is None:
            return
        self.files.add(here[0])
        self.functions.add(here)
        caller = frame.f_back
        while caller is not None and self.place(caller) is None:  # through torch, and back
            caller = caller.f_back
        there = self.place(caller) if caller is not None else None
        if there is not None and there[0] != here[0]:
            self.hops[there, here] += 1

    @staticmethod
    def place(frame: Any) -> tuple[str, str] | None:
        code = frame.f_code
        if not code.co_filename.startswith(str(SOURCE)):
            return None
        return code.co_filename.removeprefix(str(SOURCE)), f"{code.co_qualname}:{code.co_firstlineno}"

    def figures(self) -> dict[str, int]:
        # Without lambdas and comprehensions.
        named = [name for _, name in self.functions if not re.search(r"<(?!locals)", name)]
        found = {"files": len(self.files), "functions": len(self.functions), "named functions": len(named)}
        return found | {"hops": len(self.hops), "calls to other files": self.hops.total()}


def walk_batch() -> Walk:
    """The third step of a small run: first uses are behind it, and no checkpoint is due."""
    from lmworks.spec import load_run
    from lmworks.train import Trainer

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "data.path=stdlib:bytes",
            "optim.steps=4",
            "checkpoint.every=4",
            "cluster.device=cpu",
            "log.eval_every=0",
        ]
        trainer = Trainer(load_run("tiny", words), Path(folder) / "run", quiet=True)
        walk = Walk()
        step, taken = trainer.next_step, 0

        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken != 3:
                return step(*arguments, **named)
            with walk:
                return step(*arguments, **named)

        trainer.next_step = watched  # type: ignore[method-assign]
        trainer.run()
    return walk


def walk_prediction() -> Walk:
    """Memory and step time of a 70B on 64 GPUs, as `lmworks plan` predicts them."""
    from lmworks.plan.predict import predict
    from lmworks.plan.step.uncalibrated import sustained_machine
    from lmworks.spec import load_run

    def predicted(name: str) -> None:
        spec = load_run(f"configs/reference/{name}.toml")
        assert spec.cluster.accelerator is not None
        assert predict(spec, sustained_machine(spec.cluster.accelerator, "")).time is not None

    predicted("7b-8-h100")  # tables are read once
    walk = Walk()
    with walk:
        predicted("70b-64-h100")
    return walk


def walk_step_time() -> Walk:
    """The step time alone of the same run, its spec loaded before."""
    from lmworks.plan.predict import time_of
    from lmworks.plan.step.uncalibrated import sustained_machine
    from lmworks.spec import load_run

    specs = [load_run(f"configs/reference/{name}.toml") for name in ("7b-8-h100", "70b-64-h100")]
    machines = [sustained_machine(spec.cluster.accelerator, "") for spec in specs if spec.cluster.accelerator]
    assert time_of(specs[0], machines[0]) is not None  # tables are read once
    walk = Walk()
    with walk:
        assert time_of(specs[1], machines[1]) is not None
    return walk


def walk_request() -> Walk:
    """Ten tokens after a prompt of four, from the offline API."""
    from lmworks import LLM, SamplingParams

    llm = LLM("tiny")
    params = SamplingParams(temperature=0.8, max_tokens=10, ignore_eos=True)
    llm.generate([[1, 2, 3, 4]], params)
    walk = Walk()
    with walk:
        llm.generate([[5, 6, 7, 8]], params)
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "one batch, trained": walk_batch,
    "one 70B step, predicted": walk_prediction,
    "its step time alone": walk_step_time,
    "one request, answered": walk_request,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="NAME", help="keep the figures under this name, e.g. before")
    asked = parser.parse_args()
    rooms = by_room()
    total = {key: sum(room[key] for room in rooms.values()) for key in ("files", "lines")}
    found = {
        "rooms": rooms,
        "total": total,
        "fragments": fragments(),
        "walks": {name: walk().figures() for name, walk in WALKS.items()},
        "files touched": {name: len(touched(pattern)) for name, pattern in CHANGES.items()},
    }
    for room, figures in sorted(rooms.items(), key=lambda item: -item[1]["lines"]):
        print(f"{room:12} {figures['files']:4} files {figures['lines']:6,} lines")
    print(f"{'all':12} {total['files']:4} files {total['lines']:6,} lines; {found['fragments']}")
    for name, figures in found["walks"].items():
        print(f"{name:26} {figures}")
    for name, count in found["files touched"].items():
        print(f"{name:26} {count} files")
    if asked.record:
        path = RESULTS / "code_metrics.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**kept, asked.record: {"commit": commit(), **found}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
