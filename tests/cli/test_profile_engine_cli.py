"""`lmworks profile engine`: a table, JSON and a page of the same figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmworks.cli.main import main
from lmworks.trace import read_trace
from typed import lmworks


def test_a_table_json_and_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "deep" / "engine.html"
    lengths = ["--requests", "3", "--input", "16", "--output", "8"]
    base = ["lmworks", "profile", "engine", "--model", "tiny", *lengths, "engine.max_seqs=8"]
    trace = tmp_path / "traces" / "engine.json.gz"
    for arguments in ([*base, "--json", "--html", str(page)], [*base, "--trace", str(trace)]):
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        out = capsys.readouterr().out
        if "--json" in arguments:
            facts = json.loads(out)
    assert [row["batch"] for row in facts["batching"]] == [1, 2, 4, 8]
    assert {"prefill", "cache", "host", "steps", "workload"} <= facts.keys()
    assert "efficiency" in out and "cache reads" in out and "between tokens" in out
    assert "Steps, in milliseconds" in out and len(read_trace(trace).steps) >= 8  # one a token at least
    text = page.read_text()
    assert "Throughput and latency by batch" in text and f"{facts['batching'][3]['ms']:.3f}" in text


def test_a_page_that_cannot_be_written_costs_no_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = ["--model", "tiny", "--requests", "2", "--output", "4", "engine.max_seqs=2", "--json"]
    code, out, err = lmworks(capsys, "profile", "engine", *asked, "--html", str(tmp_path / "file" / "page.html"))
    assert code == 2 and "--html" in err
    assert json.loads(out)["model"] == "tiny"
