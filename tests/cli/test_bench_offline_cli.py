"""`lmworks bench offline`: the names that programs rely on, and what people see."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from lmworks.bench import engine
from lmworks.cli.bench_inference import process_age
from lmworks.cli.main import main


def lmworks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmworks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow  # imports PyTorch in a new process
def test_start_up_is_measured_from_the_start_of_the_process() -> None:
    done = lmworks("bench", "offline", "--model", "tiny", "--requests", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["startup_s"] > 0.5  # importing torch alone takes longer


def test_a_program_gets_every_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "offline", "--model", "tiny", "--requests", "6", "--json", "engine.max_seqs=64"]
    monkeypatch.setattr(sys, "argv", ["lmworks", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    facts = json.loads(capsys.readouterr().out)
    for name in ("output_tokens_per_s", "prefill_s", "decode_s", "startup_s", "floor_ms"):
        assert isinstance(facts[name], float) and facts[name] > 0, name
    assert set(facts["decode_ms"]) == {"1", "8", "64"} and facts["model"] == "tiny"
    assert facts["requests"] == 6 and facts["input"] == facts["output"] == [6, 64]


def test_people_get_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["lmworks", "bench", "offline", "--model", "tiny", "--requests", "3", "--output", "4"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert not end.value.code and "tiny on cpu, fp32" in out
    for word in ("start-up", "prefill", "decode", "preemptions", "floor, ms"):
        assert word in out


def test_people_see_a_clock_and_first_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    power = {"watts": 650.0, "limit_watts": 700.0, "joules": 1e4, "clock_mhz": 1725.4, "max_clock_mhz": 1980}
    power |= {"celsius": 61, "held_back": {"power cap": 0.5}, "samples": 9}
    seen = SimpleNamespace(between=lambda *_: power)
    monkeypatch.setattr(engine, "monitor_power", lambda _device: nullcontext(seen))
    met = {"kernels": ["forward_kernel"], "graphs": 2}
    monkeypatch.setattr(engine.EngineBench, "first_times", lambda _bench: nullcontext(met))
    monkeypatch.setattr(sys, "argv", ["lmworks", "bench", "offline", "--model", "tiny", "--requests", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    out = " ".join(capsys.readouterr().out.split())
    assert not end.value.code
    assert "clock 1,725 MHz of 1,980 MHz, at 650 of 700 W, 61 °C; held back by power cap in 50% of samples" in out
    assert "first times 3 kernels compiled or read: 1, graphs recorded: 2" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "tinny"], "tinny is neither a folder nor a preset; did you mean 'tiny'?"),
        (["--model", "tiny", "--input", "9:3"], "1 ≤ LOW ≤ HIGH"),
        (["--model", "tiny", "--output", "some"], "--output = 'some'"),
        (["--model", "tiny", "engine.blok=1"], "unknown key 'engine.blok'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lmworks", "bench", "offline", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_the_age_of_this_process() -> None:
    first = process_age()
    assert 0 < first <= process_age() < 24 * 3600
