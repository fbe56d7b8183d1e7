"""`lmworks plan memory` and `lmworks plan search` as they are typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmworks.spec import load_run
from typed import lmworks

MEMORY = ["plan", "memory", "llama3-8b", "--cluster", "8xh100", "--zero", "3", "--seq", "8192", "--micro-batch", "1"]
SEARCH = ["plan", "search", "llama3-8b", "--cluster", "8xh100", "--seq", "4096", "--global-batch", "64"]
ONE = ["--fix", "recompute=full", "--fix", "schedule=1f1b", "--fix", "tp=1", "--seq", "2048"]
QUICK = ["--fix", "recompute=full", "--fix", "schedule=1f1b", "--fix", "offload=none"]
BYTES = ["parameters", "gradients", "optimizer", "master", "activations", "logits", "buffers", "allocated", "reserved"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = lmworks(capsys, *args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_memory_of_zero_3(capsys: pytest.CaptureFixture[str]) -> None:
    """ψ = 8,030,261,248 weights over 8 ranks, AdamW in fp32: 4ψ/8, 4ψ/8 and 8ψ/8 bytes, and a count of each weight."""
    sheet = answer(capsys, *MEMORY)
    share = 8_030_261_248 // 8
    assert [sheet[name] >= 0 for name in BYTES] == [True] * len(BYTES)
    assert sheet["parameters"] == sheet["gradients"] == 4 * share
    assert sheet["optimizer"] == 8 * share + 4 * (2 + 1 + 32 * 9)  # embedding, head; last norm; 9 weights a block
    parts = sum(sheet[name] for name in BYTES[:7]) - sheet["absent"]
    assert sheet["allocated"] == pytest.approx(parts)
    assert sheet["reserved"] > sheet["allocated"]


def test_less_is_held_by_later_stages_and_more_by_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    zero = [answer(capsys, *MEMORY[:5], "--zero", str(stage), "--seq", "2048") for stage in range(4)]
    held = [sum(one[name] for name in ("parameters", "gradients", "optimizer")) for one in zero]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    short, long = (answer(capsys, *MEMORY[:5], "--seq", seq)["activations"] for seq in ("2048", "8192"))
    assert long == pytest.approx(4 * short, rel=0.1)


def test_a_table_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, *MEMORY, "--recompute", "full")
    assert code == 0
    assert "dp=8 ZeRO-3, recompute full, micro-batch 1" in out and "\nfits: " in out
    code, out, _ = lmworks(capsys, "plan", "memory", "llama3-70b", "--cluster", "8xh100")
    assert code == 0
    assert "does NOT fit" in out


def test_search_finds_a_spec_to_train_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec, page = tmp_path / "best.toml", tmp_path / "plan.html"
    fixed = ["--fix", "schedule=1f1b", "--fix", "offload=none"]
    found = answer(capsys, *SEARCH, *fixed, "--out", str(spec), "--html", str(page))
    best = found["front"][0]
    assert found["legal"] > found["fitting"] >= len(found["front"]) > 0
    assert best["step_s"] == pytest.approx(sum(best["parts"].values()))
    assert best["interval"][0] < best["step_s"] < best["interval"][1]
    assert 0.2 < best["mfu"] <= best["hfu"] < 0.7
    assert best["tokens_per_s"] == pytest.approx(64 * 4096 / best["step_s"])
    assert set(BYTES) <= best["memory"].keys()
    run = load_run(spec)
    assert run.parallel.world == 8 and run.data.global_batch == 64 and run.data.seq == 4096
    assert {axis: getattr(run.parallel, axis) for axis in ("tp", "pp", "cp")} == {
        axis: best["layout"][axis] for axis in ("tp", "pp", "cp")
    }
    assert page.read_text().startswith("<!doctype html>")


def test_what_is_typed_of_the_cluster_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """Slower links and dearer hours must be seen in the answer."""
    asked = ["plan", "search", "llama3-8b", "--cluster", "16xh100", "--seq", "4096", "--global-batch", "64"]
    fixed = ["--fix", "tp=1", "--fix", "pp=1", "--fix", "cp=1", "--fix", "zero=3", "--fix", "recompute=full"]
    usual = answer(capsys, *asked, *fixed)["front"][0]
    for change in ("cluster.nic_gbs=5", "cluster.network=ethernet", "cluster.fabric=pcie"):
        assert answer(capsys, *asked[:3], change, *asked[3:], *fixed)["front"][0]["step_s"] > usual["step_s"], change
    dear = answer(capsys, *asked[:3], "cluster.price_hour=100", *asked[3:], *fixed)["front"][0]
    assert dear["bill"]["dollars"] > 5 * usual["bill"]["dollars"]
    assert dear["step_s"] == usual["step_s"]


def test_explaining(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--fix", "schedule=1f1b", "--fix", "offload=none", "--fix", "cp=1", "--fix", "recompute=full"]
    code, out, _ = lmworks(capsys, *SEARCH, *fixed, "--show", "1", "--explain", "zero=0 micro_batch=8")
    assert code == 0
    assert "does not fit: needs" in out and "the smallest changes that make it fit:" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["memory", "llama3-8b"], "what does it run on? Give --cluster"),
        (["memory", "llama3-8b", "--cluster", "-8xh100"], "-8 is not a count"),
        (["memory", "llama3-8b", "--cluster", "8xh1000"], "did you mean 'h100'"),
        (["memory", "llama3-8b", "--cluster", "12xh100"], "8xh100 or 16xh100 would"),
        (["memory", "llama3-8b", "--cluster", "8xh100", "--tp", "3"], "tp × cp × pp = 3 does not divide the 8 GPUs"),
        (["memory", "llama3-8b", "--cluster", "8xh100", "--tp", "16"], "1, 2, 4, 8 do"),
        (["memory", "llama3-8b", "--cluster", "8xh100", "--optimizer", "adam9"], "optimizer 'adam9' is not known"),
        (["search", "llama3-8b", "--cluster", "8xh100", "--fix", "tp=3"], "--explain 'tp=3' says why"),
        (["search", "llama3-8b", "--cluster", "8xh100", "--fix", "colour=3"], "colour is no part of a layout"),
        (["search", "llama3-70b", "--cluster", "1xa100", *QUICK], "nothing fits on 1 × A100-SXM-80GB"),
        (["search", "llama3-8b", "--cluster", "8xh100", *QUICK, "--out", "/dev/null/x"], "--out /dev/null/x: "),
    ],
)
def test_nonsense(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    code, _, err = lmworks(capsys, "plan", *args)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_host_memory_of_a_rank_and_of_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    away = [*MEMORY, "parallel.offload_activations=3"]
    sheet = answer(capsys, *away)
    assert sheet["host"] == 3 * 2**30 + 30 * 2**20 * (1 - 0.4)  # 102.4 MiB of 30 blocks each, in whole MiB
    assert sheet["host_per_machine"] == 8 * sheet["host"]
    _, out, _ = lmworks(capsys, *away)
    assert "host memory: 3.0 GiB a rank, 24.1 GiB for the 8 of a machine; what a machine has is not in the" in out
    assert "host memory" not in lmworks(capsys, *MEMORY)[1]
    words = ["llama3-8b", "cluster.gpu=h200", "precision.dtype=bf16", "data.seq=8192", "parallel.offload_activations=3"]
    told = answer(capsys, "plan", *words)
    assert told["host_bytes"] == told["host_bytes_per_machine"] == sheet["host"]
    assert "host memory: 3.0 GiB a rank; what a machine has" in lmworks(capsys, "plan", *words)[1]


def test_rows_of_the_memory_sheet_add_up_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One has gradients that are not made yet, which is printed below zero; the other keeps inputs of its blocks."""
    _, out, _ = lmworks(capsys, *MEMORY)
    printed = {name: float(gib) for name, gib in re.findall(r"^ (\w+) +(-?[\d.]+) GiB", out, re.MULTILINE)}
    parts = {name: gib for name, gib in printed.items() if name not in ("allocated", "reserved", "host")}
    assert parts["absent"] < 0 and sum(parts.values()) == pytest.approx(printed["allocated"], abs=0.01 * len(parts))
    kept = "blocks keep 4.00 GiB from forward to backward pass"  # 32 inputs of 8192 × 4096 in fp32
    assert kept in lmworks(capsys, *MEMORY, "parallel.recompute=full")[1] and kept not in out


def test_host_memory_is_searched_where_one_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--fix", "schedule=1f1b", "--fix", "tp=1", "--fix", "cp=1", "--fix", "pp=1"]
    words = [*SEARCH, *fixed, "precision.weights=fp32", "--offload", "--fix", "offload=none"]
    front = answer(capsys, *words)["front"]
    asking = [one for one in front if one["layout"]["offload_activations"]]
    assert asking and {one["layout"]["recompute"] for one in front} >= {"mlp"}
    for one in asking:
        gibs = one["layout"]["offload_activations"]
        assert one["host_per_machine"] == 8 * one["memory"]["host"] == pytest.approx(8 * gibs * 2**30, rel=0.01)
        assert f"{gibs:g} GiB of activations on the host" in one["text"]
    assert f"{len(asking)} of these keep something in host memory" in lmworks(capsys, *words, "--show", "99")[1]
    without = answer(capsys, *SEARCH, *fixed)["front"]
    assert without and not any(one["host_per_machine"] for one in without)
    (optimizer, *_) = answer(capsys, *SEARCH, *fixed, "--fix", "offload=optimizer")["front"]
    assert optimizer["layout"]["offload"] == "optimizer"


def test_weights_are_kept_in_whichever_format_is_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One front of both, and the written spec says which: it fits in fewer bytes, with exact fp32 weights."""
    words = [*SEARCH, *QUICK, "--fix", "tp=1"]
    both = answer(capsys, *words, "--out", str(tmp_path / "best.toml"))
    each = {kept: answer(capsys, *words, f"precision.weights={kept}") for kept in ("fp32", "bf16")}
    assert both["legal"] == sum(one["legal"] for one in each.values())
    best = both["front"][0]
    assert (
        best["step_s"] == min(one["front"][0]["step_s"] for one in each.values()) == each["bf16"]["front"][0]["step_s"]
    )
    assert best["weights"] == "bf16" and best["text"].endswith("bf16 weights")
    assert {one["weights"] for one in each["fp32"]["front"]} == {"fp32"}
    written = load_run(str(tmp_path / "best.toml")).precision
    assert (written.weights, written.master, written.dtype) == ("bf16", True, "bf16")
    assert {one["weights"] for one in answer(capsys, *words, "--dtype", "fp32")["front"]} == {"fp32"}


def test_an_explained_layout_is_in_the_weights_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """127 GiB of fp32 weights, gradients and moments; in 14 bytes a parameter two GPUs hold what two of 16 do not."""
    words = ["plan", "search", "llama3-8b", "--cluster", "2xh100", "--global-batch", "2", *ONE]
    either = answer(capsys, *words, "--explain", "zero=3")["explained"]
    each = {w: answer(capsys, *words, f"precision.weights={w}", "--explain", "zero=3") for w in ("fp32", "bf16")}
    fits = [w for w in each if not each[w]["explained"]["binding"]]
    assert fits and either == each[fits[0]]["explained"]
    one = ["plan", "search", "llama3-8b", "--cluster", "1xh100", "--global-batch", "1", *ONE, "--explain", "zero=0"]
    assert ", bf16 weights\ndoes not fit" in lmworks(capsys, *one)[1]


def test_what_fits_in_host_memory_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, "plan", "search", "llama3-8b", "--cluster", "1xh100", "--global-batch", "1", *ONE)
    assert code == 2 and "nothing fits on 1 × H100-SXM-80GB" in err
    assert "With --offload some fits on 1 × H100-SXM-80GB" in err
    words = ["plan", "search", "llama3-8b", "--cluster", "1xh100", "--global-batch", "1", *ONE]
    out = lmworks(capsys, *words, "--explain", "offload=optimizer")[1]
    assert out.startswith("nothing fits on 1 × H100-SXM-80GB") and "GiB a GPU  free" not in out
    code, _, err = lmworks(capsys, "plan", "search", "llama3-8b", "--cluster", "1xa10", "--global-batch", "1", *ONE)
    assert code == 2 and "nothing fits" in err and "--offload" not in err


def test_a_machine_alone_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "search", "gpt2-small", "--seq", "1024", "--global-batch", "16", "--fix", "recompute=full"]
    assert answer(capsys, *words, "--cluster", "8xrtx4090")["front"]
    assert "cluster.nic_gbs" in lmworks(capsys, *words, "--cluster", "16xrtx4090")[2]
