"""What every test shares: one thread for each process, a cache of its own, and tiny data made on the spot."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import typer.testing

# Before torch is imported, and inherited by every process a test starts. Tiny matrices gain nothing from threads,
# and two processes with a thread a core each wait for one another more than they compute.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["LMWORKS_CACHE"] = tempfile.mkdtemp(prefix="lmworks-test-cache-")
os.environ.pop("COLUMNS", None)  # of the terminal that tests are started from: what they print is as wide as it is
# A process that may not leave its bytecode behind compiles all of LMWorks again, and so does every one that it starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # while tests are collected: what is imported is no garbage, and to look for some takes as long again
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts its background jobs so, and commands inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Do here, once, what PyTorch and Typer do on first use: a forked rank that had to would do little else."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        importlib.import_module("lmworks.learn.checking.interpreter").replace_language_once()
    if "torch" in sys.modules:
        importlib.import_module("half_products").multiply_in_fp32()
    if "lmworks.parallel.local_ranks" in sys.modules:
        for name in ("numpy.ma", "torch._dynamo"):
            importlib.import_module(name)
        importlib.import_module("lmworks.train.device").warm_runtime()
    if "lmworks.cli.main" in sys.modules:
        # Else a tenth of a second at every call. The help names all commands, and so imports them.
        typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
        typer.testing.CliRunner().invoke(sys.modules["lmworks.cli.main"].app, ["--help"])
        typer.testing.CliRunner().invoke(sys.modules["lmworks.cli.main"].app, ["models", "--json"])
        table = importlib.import_module("lmworks.cli.tables")  # whatever a test prints fits every terminal
        vars(table).update(render_table=importlib.import_module("fitting_tables").checked(table.render_table))
    if {"lmworks.cli.main", "lmworks.report.run_report"} & sys.modules.keys():
        # To draw the PNGs of a report takes longer than a small run: done where somebody looks at them.
        vars(importlib.import_module("lmworks.report.run_report")).update(draw_plots=lambda folder, steps: [])
    gc.freeze()  # else each forked rank copies the pages of all that was imported when it looks for garbage
    atexit.register(gc.unfreeze)  # so late that pytest, which looks for garbage twice at its end, does not find it
    gc.enable()
    if "torch" in sys.modules and sys.platform == "linux":
        importlib.import_module("huge_pages").collapse_heap()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait, for a process to start, a timeout, a rank."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: a worker takes a file at a time, and one that begins late would keep the others waiting."""
    if "hypothesis" in sys.modules:
        # It would read all of LMWorks for constants to try, and its examples depend on what else was imported here.
        providers = importlib.import_module("hypothesis.internal.conjecture.providers")
        vars(providers).update(is_local_module_file=lambda path: False)
    order = {
        name: place
        for place, name in enumerate(
            ("prove", "plan", "kernels", "train", "align", "parallel", "engine", "serve", "bench", "checkpoint")
        )
    }
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["LMWORKS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """What tests of other files imported is not looked at again, here and in the ranks that are forked from here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Back as they were: torchrun's agent, which some tests run in this process, leaves its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report has its PNGs drawn."""
    from lmworks.report import plots, run_report

    monkeypatch.setattr(run_report, "draw_plots", plots.draw_plots)


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that a test starts, and those that these start, are forks of this process."""
    from forked_python import fork_programs

    fork_programs(monkeypatch)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents as bytes, prepared as `lmworks data prepare` does."""
    from lmworks.data import prepare
    from tiny import write_documents

    root = tmp_path_factory.mktemp("data")
    return prepare([str(write_documents(root / "text.jsonl"))], root / "tokens", workers=1).folder
