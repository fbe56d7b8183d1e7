"""Tables in terminals of 60 to 200 columns: every command's, with nothing cut, and what is left out named."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.text import Text

import lmworks as package
import typed
from fitting_tables import seen
from lmworks.cli import tables
from lmworks.cli.plan_validate import percent, print_report
from lmworks_validation.replay import Line, replay
from table_samples import SAMPLES, Sample, show

ROOT = Path(package.__file__).parent


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_prose_gives_way_before_figures() -> None:
    rows = [["step", "12.5 ms", "the slowest of all that were timed: 14.25 ms"]]
    assert plain(tables.render_table("", ["", "measured", "how it was found"], rows, 42)) == [
        "",
        "       measured  how it was found",
        " " + "─" * 41,
        " step   12.5 ms  the slowest of all that",
        "                 were timed: 14.25 ms",
        "",
    ]


def test_prose_may_begin_with_a_figure() -> None:
    rows = [["8 × H100-SXM-80GB: tp=4, dp=2 ZeRO-2, micro-batch 1", "34.5"]]
    assert plain(tables.render_table("", ["layout", "GiB"], rows, 40))[3:5] == [
        " 8 × H100-SXM-80GB: tp=4, dp=2      34.5",
        " ZeRO-2, micro-batch 1",
    ]


def test_columns_go_in_their_order_and_are_named() -> None:
    columns, row = ["name", "fp32", "bf16", "GB/s"], ["H100-SXM-80GB", "67", "989", "3350"]
    lines = plain(tables.render_table("", columns, [row], 28, drop=("GB/s", "fp32")))
    assert lines[1:4] == [" name           fp32  bf16", " " + "─" * 25, " H100-SXM-80GB    67   989"]
    assert " ".join(lines[4:]) == "not shown in 28 columns: GB/s (a wider terminal has them, and --json) "
    assert "fp32," not in lines[4]


def test_a_table_that_is_still_too_wide_is_turned() -> None:
    rows = [["runs/a", "1,234,567", "[x] is text"], ["runs/b", "-0.35", ""]]
    assert plain(tables.render_table("Runs", ["run", "tokens", "note"], rows, 20)) == [
        *("Runs", "", "run: runs/a", "  tokens: 1,234,567", "  note:   [x] is text", ""),
        *("run: runs/b", "  tokens: -0.35", ""),
    ]


def test_figures_stand_under_one_another() -> None:
    lines = plain(tables.render_table("", ["a", "b"], [["+1.5", "$2"], ["-12.25", "-"]], None))
    assert lines[3:5] == ["   +1.5  $2", " -12.25   -"]


def test_a_column_that_is_not_there_cannot_be_dropped() -> None:
    with pytest.raises(ValueError, match="no such column"):
        tables.render_table("", ["a"], [["1"]], 80, drop=("b",))


def test_tables_are_made_in_one_place() -> None:
    """A command that builds a table of its own would have to learn all of this again."""
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "rich" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not {"rich.table", "rich.columns"} & {module, *names, *(f"{module}.{name}" for name in names)}, file


def places() -> set[str]:
    """Every function that prints a table."""
    found = set()
    for file in (ROOT / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
                if any(isinstance(call, ast.Name) and call.id == "print_table" for call in calls):
                    found.add(f"{file.stem}.{node.name}")
    return found


def test_every_table_has_a_sample() -> None:
    """A new table: add what prints it to table_samples.py."""
    assert {place for _, where in SAMPLES for place in where.split()} == places()


@pytest.mark.parametrize(("prints", "where"), SAMPLES, ids=[where.split()[0] for _, where in SAMPLES])
def test_every_table_of_every_command_fits(
    prints: Callable[[Sample], object], where: str, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed in a test is checked at every width: see fitting_tables.py."""
    monkeypatch.setenv("COLUMNS", "80")
    seen.clear()
    prints(sample)
    assert seen >= set(where.split())


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sample:
    monkeypatch.chdir(tmp_path)
    return Sample(tmp_path, monkeypatch, lambda *words: typed.lmworks(capsys, *words))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
def test_every_figure_of_the_catalogue(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"fp32": "fp32_tflops", "bf16": "bf16_tflops", "fp8": "fp8_tflops", "GB/s": "bandwidth_gbs"}
    fields |= {"fp16": "fp16_tflops", "link GB/s": "link_gbs", "network GB/s": "nic_gbs", "W": "tdp_w"}
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = typed.lmworks(capsys, "hardware")
    text = " ".join(out.split())
    gone = text.partition(f"not shown in {width} columns: ")[2].partition(" (a wider")[0].split("; ")
    for gpu in json.loads(typed.lmworks(capsys, "hardware", "--json")[1]):
        assert all(word in text.split() for word in gpu["name"].split())
        assert "bf16" not in gone and "GB/s" not in gone
        for column in (name for name in fields if name not in gone):
            assert not gpu[fields[column]] or f"{gpu[fields[column]]:g}" in text.split()
    assert " 0.35 " in text  # dollars an hour of a T4
    assert max(map(len, out.splitlines()[:-1])) <= width  # below the table stands a sentence


def test_validation_shows_sources_and_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replay(None, "torchtitan")
    for width in (60, 80, 100, 120, 160, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        print_report(report)
        out = capsys.readouterr().out
        for line in report.lines:
            (row,) = [one for one in map(str.split, out.splitlines()) if one[-1:] != [":"] and starts(one, line)]
            assert percent(line.fitted.mape) in row


def starts(row: list[str], line: Line) -> bool:
    name = [*f"{line.source} {line.group}".split(), {"tokens_per_s": "tokens/s"}.get(line.figure, line.figure)]
    return row[: len(name)] == name


def terminal(width: int, *words: str) -> str:
    """What a terminal of this width shows of a command."""
    ours, theirs = pty.openpty()
    size = f"import fcntl, termios, struct; fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('4H', 40, {width}, 0, 0))"
    subprocess.run([sys.executable, "-c", size], stdin=theirs, check=True)
    unset = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-m", "lmworks", *words], stdin=theirs, stdout=theirs, env={**unset, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert child.wait() == 0
    return re.sub(r"\x1b\[[\d;]*m", "", shown.decode().replace("\r", ""))


def test_a_real_terminal_is_respected_and_a_pipe_gets_all() -> None:
    narrow = terminal(70, "hardware")
    assert max(map(len, narrow.splitlines()[:-1])) <= 70
    assert "H100-SXM-80GB" in narrow and "not shown in 70 columns: fp32" in narrow
    piped = subprocess.run(
        [sys.executable, "-m", "lmworks", "hardware"],
        env={key: value for key, value in os.environ.items() if key != "COLUMNS"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "not shown" not in piped and "network GB/s" in piped and "\x1b" not in piped


def test_a_narrow_run_keeps_when_and_at_which_step(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = show(sample)
    (line,) = [line for line in out.splitlines() if "spike" in line]
    assert line.split()[:3] == ["0:04", "4", "spike"]
    assert "loss 9.25 is high" in out
