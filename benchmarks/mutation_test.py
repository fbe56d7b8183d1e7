"""Mutation testing of one room: change one covered line at a time, and see whether the tests that cover it fail.

    python benchmarks/mutation_test.py diagnose                                  # 40 mutants, tests/diagnose
    python benchmarks/mutation_test.py record --tests tests/record tests/report --mutants 10 -n 2

1. The tests run once under `sys.settrace`: which test executes which line of the room, in forked processes too.
2. Mutants are sampled from the covered lines with a fixed seed (operators: see `mutations`).
3. Each mutant is written into a copy of the tree, and the tests that cover its line run there, the quickest first, with
   -x and a time limit. The working tree is never changed.

results/mutation_ROOM.json is written after every mutant; the next call continues where the last one stopped. A survivor
that no test can detect gets a reason in its field "equivalent" by hand; later runs keep it and do not count the mutant.
After tests were improved, --retry runs the survivors of that file again. It keeps the sample, although the new tests
may cover more lines. "first_result" of a row is the result before.
Processes that a test starts as new programs are not traced, but they do run the mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MARKS = "not slow and not gpu and not browser and not deepspeed and not ray and not trl"
COVERAGE_FILE, COVERED_ROOM = "MUTATION_COVERAGE_FILE", "MUTATION_COVERED_ROOM"
COLLECTION = ""  # the test name of lines that run at import


# --- coverage: this file is also a pytest plugin (-p mutation_test) -------------------------------------


def pytest_configure() -> None:
    """Trace lines of the room. Each (test, file, line) is appended once, so that forked processes report too."""
    room = os.environ.get(COVERED_ROOM)
    if not room:
        return
    out = os.open(os.environ[COVERAGE_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    seen: set[tuple[str, str, int]] = set()

    def trace_line(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            test = os.environ.get("PYTEST_CURRENT_TEST", COLLECTION).rpartition(" (")[0]
            key = test, frame.f_code.co_filename, frame.f_lineno
            if key not in seen:
                seen.add(key)
                os.write(out, (json.dumps(key) + "\n").encode())
        return trace_line

    def trace_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(room) else None

    threading.settrace(trace_call)
    sys.settrace(trace_call)


def pytest_runtest_logreport(report: Any) -> None:
    """Durations and failures, beside the lines."""
    if COVERED_ROOM in os.environ and (report.when == "call" or report.failed):
        with open(os.environ[COVERAGE_FILE], "a", encoding="utf-8") as out:
            out.write(json.dumps({"test": report.nodeid, "seconds": report.duration, "failed": report.failed}) + "\n")


@dataclass(frozen=True)
class Coverage:
    tests_of: dict[str, dict[int, set[str]]]  # file → line → tests
    seconds: dict[str, float]  # by test

    def covering(self, file: str, line: int) -> list[str]:
        """Tests of a line, the quickest first; of a line that runs at import (a constant, a field), all of the room."""
        tests = self.tests_of[file].get(line, set()) - {COLLECTION}
        if not tests:
            tests = set().union(*(of for lines in self.tests_of.values() for of in lines.values())) - {COLLECTION}
        return sorted(tests & self.seconds.keys(), key=lambda test: self.seconds[test])


def measure_coverage(room: Path, tests: list[str], work: Path) -> Coverage:
    """Run the tests under the tracer, unless a trace of the same sources and tests is in `work`."""
    digest = hashlib.sha256()
    for path in (room, *(ROOT / name for name in tests)):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    trace = work / f"coverage-{digest.hexdigest()[:16]}.jsonl"
    if not trace.exists():
        partial = trace.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        paths = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
        environment = {**os.environ, COVERAGE_FILE: str(partial), COVERED_ROOM: f"{room}{os.sep}", "PYTHONPATH": paths}
        code = subprocess.run(test_command(tests, "-p", "mutation_test"), cwd=ROOT, env=environment).returncode
        if code not in (0, 1):
            sys.exit(f"the tests could not be run: pytest exited with {code}")
        partial.rename(trace)
    return read_coverage(trace)


def read_coverage(trace: Path) -> Coverage:
    tests_of: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = {}
    failed = set()
    for entry in map(json.loads, trace.read_text(encoding="utf-8").splitlines()):
        if isinstance(entry, dict):
            seconds[entry["test"]] = entry["seconds"]
            failed |= {entry["test"]} if entry["failed"] else set()
        else:
            test, file, line = entry
            tests_of[str(Path(file).relative_to(ROOT))][line].add(test)
    if failed:
        print(f"{len(failed)} tests fail without a mutation and are left out: {', '.join(sorted(failed))}")
    return Coverage(tests_of, {test: value for test, value in seconds.items() if test not in failed})


def test_command(tests: list[str], *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, *options, *tests]


# --- mutants --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    column: int
    operator: str
    before: str
    after: str
    start: int  # byte offsets of `before` in the file
    end: int

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.operator}: {self.before} → {self.after}"


SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
EFFECTS = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)  # statements worth deleting


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, mutated node) of one node."""
    changed: Any = copy.deepcopy(node)
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                changed = copy.deepcopy(node)
                changed.ops[index] = SWAPPED[type(operator)]()
                yield "comparison", changed
        case ast.BoolOp():
            changed.op = SWAPPED[type(node.op)]()
            yield "boolean operator", changed
        case ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPPED and not is_text(node):
            changed.op = SWAPPED[type(node.op)]()
            yield "arithmetic operator", changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "removed not" if isinstance(node.op, ast.Not) else "removed minus", changed.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
            yield "constant", ast.Constant(node.value - 1)
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield "negated condition", changed
        case ast.Call(func=ast.Name(id="min" | "max")):
            changed.func = ast.Name("max" if node.func.id == "min" else "min")
            yield "min and max", changed
    if isinstance(node, EFFECTS) or is_effect(node):
        yield "deleted statement", ast.Pass()


def is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Sums of strings and lists: their difference is a type error, which proves nothing."""
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    texts = (ast.JoinedStr, ast.List, ast.ListComp, ast.Dict, ast.Set, ast.Tuple)
    return any(isinstance(s, texts) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides)


def is_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom)
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)


def mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but decorators, annotations, types in isinstance(), and code for type checkers."""
    skipped: list[Any] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            skipped = [*node.decorator_list, node.returns]
        case ast.ClassDef():
            skipped = [*node.decorator_list, *node.bases, *node.keywords]
        case ast.arg() | ast.AnnAssign():
            skipped = [node.annotation]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            skipped = node.body
        case ast.Call(func=ast.Name(id="isinstance" | "cast" | "TypeVar")):
            skipped = node.args[1:] if node.func.id == "isinstance" else node.args
        case ast.JoinedStr():
            return  # pieces of f-strings have no positions of their own in Python 3.11
    yield node
    for child in ast.iter_child_nodes(node):
        if not any(child is one for one in skipped):
            yield from mutable_nodes(child)


def mutants_of(file: str, lines: set[int]) -> Iterator[Mutant]:
    text = (ROOT / file).read_bytes()
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def mutant(node: Any, operator: str, after: str) -> Mutant:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(text[start:end].decode().split())
        return Mutant(file, node.lineno, node.col_offset, operator, before, after, start, end)

    for node in mutable_nodes(ast.parse(text)):
        if getattr(node, "lineno", None) in lines:
            for operator, changed in mutations(node):
                code = ast.unparse(ast.fix_missing_locations(changed))
                yield mutant(node, operator, f"({code})" if isinstance(changed, ast.expr) else code)
        tests = node.ifs if isinstance(node, ast.comprehension) else [node.test] if conditional(node) else []
        for test in tests:
            if test.lineno in lines:
                yield mutant(test, "negated condition", f"(not ({ast.unparse(test)}))")


def conditional(node: ast.AST) -> bool:
    return isinstance(node, ast.If | ast.While) and not (isinstance(node.test, ast.Name) and "TYPE" in node.test.id)


# --- runs -----------------------------------------------------------------------------------------------


def copy_tree(destination: Path) -> Path:
    """What git tracks or would track, and all of src: native code that was built there too."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", destination / "src", dirs_exist_ok=True, ignore=ignored)
    return destination


def run_mutant(mutant: Mutant, coverage: Coverage, tree: Path) -> dict[str, Any]:
    tests = coverage.covering(mutant.file, mutant.line)
    path, original = tree / mutant.file, (ROOT / mutant.file).read_bytes()
    limit_s = 60 + 4 * sum(coverage.seconds[test] for test in tests)
    began = time.monotonic()
    write_module(path, original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        code, output = run_tests(tests, tree, limit_s)
    finally:
        write_module(path, original)
    result = "killed" if code else "survived"
    how = {0: "", -1: f"time limit of {limit_s:.0f} s"}.get(code, first_failure(output) or f"pytest exited with {code}")
    fields = {key: value for key, value in asdict(mutant).items() if key not in ("start", "end")}
    seconds = round(time.monotonic() - began, 1)
    return {
        **fields, "result": result, "first_result": result, "how": how, "tests": len(tests), "seconds": seconds,
        "equivalent": "",
    }  # fmt: skip


def write_module(path: Path, text: bytes) -> None:
    """Without the byte code of the text before: Python compares times in whole seconds."""
    path.write_bytes(text)
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink()


def run_tests(tests: list[str], tree: Path, limit_s: float) -> tuple[int, str]:
    """The exit code of pytest, −1 after the time limit, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = test_command(tests, "-x", "--tb=no")
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_session(process)
        out.seek(0)
        return code, out.read()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """pytest and what it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def first_failure(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")[:200]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [row for row in rows if not row["equivalent"]]
    killed = sum(row["result"] == "killed" for row in counted)
    at_first = sum(row["first_result"] == "killed" for row in counted)
    share = round(killed / len(counted), 3) if counted else None
    return {
        "mutants": len(rows), "equivalent": len(rows) - len(counted), "killed": killed,
        "survived": len(counted) - killed, "killed_share": share, "killed_at_first": at_first,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help="a folder under src/lmworks, e.g. diagnose or engine/core")
    parser.add_argument("--tests", nargs="+", help="test files or folders (default: tests/ROOM)")
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retry", action="store_true", help="run known survivors again, after tests were improved")
    parser.add_argument("-n", type=int, default=1, dest="workers", help="mutants at a time")
    options = parser.parse_args()
    room = ROOT / "src" / "lmworks" / options.room
    if not room.is_dir():
        sys.exit(f"{room} is not a folder")
    tests = options.tests or [f"tests/{options.room.split('/')[0]}"]
    name = options.room.replace("/", "_")
    work = Path(tempfile.gettempdir()) / f"lmworks-mutation-{name}"
    work.mkdir(exist_ok=True)
    coverage = measure_coverage(room, tests, work)
    candidates = [m for file in sorted(coverage.tests_of) for m in mutants_of(file, set(coverage.tests_of[file]))]
    candidates = [mutant for mutant in candidates if coverage.covering(mutant.file, mutant.line)]
    path = RESULTS / f"mutation_{name}.json"
    results = json.loads(path.read_text()) if path.exists() else {"rows": [], "possible": 0}
    before = {row["key"]: row for row in results["rows"]}
    possible = results["possible"] if options.retry else len(candidates)
    if options.retry:
        chosen = [mutant for mutant in candidates if mutant.key in before]
        known = {key: row for key, row in before.items() if row["result"] == "killed" or row["equivalent"]}
    else:
        chosen = random.Random(options.seed).sample(candidates, min(options.mutants, len(candidates)))
        known = before
    rows = {mutant.key: known[mutant.key] for mutant in chosen if mutant.key in known}
    print(f"{len(candidates)} possible mutants on covered lines, {len(chosen)} sampled, {len(rows)} known")

    def record() -> None:
        listed = [rows[mutant.key] for mutant in chosen if mutant.key in rows]
        head = {"room": options.room, "tests": tests, "seed": options.seed, "possible": possible}
        path.write_text(json.dumps({**head, **summary(listed), "rows": listed}, indent=1, ensure_ascii=False) + "\n")

    trees: queue.Queue[Path] = queue.Queue()

    def work_on(mutant: Mutant) -> dict[str, Any]:
        tree = trees.get()
        try:
            return {"key": mutant.key, **run_mutant(mutant, coverage, tree)}
        finally:
            trees.put(tree)

    with (
        tempfile.TemporaryDirectory(prefix="mutants-", dir=work) as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        for number in range(options.workers):
            trees.put(copy_tree(Path(folder) / str(number)))
        for done in as_completed([pool.submit(work_on, mutant) for mutant in chosen if mutant.key not in rows]):
            row = done.result()
            row["first_result"] = before.get(row["key"], row)["first_result"]
            rows[row["key"]] = row
            record()
            print(f"{row['result']:8} {row['seconds']:6.1f} s  {row['key']}", flush=True)
    record()
    print(json.dumps(summary([rows[mutant.key] for mutant in chosen])))


if __name__ == "__main__":
    main()
