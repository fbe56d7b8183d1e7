"""Two nodes on one machine: what is planted in the link between them is what collectives find there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.bench.collectives import Row, Sweep, measure
from lmworks.bench.link_profile import fits_of
from lmworks.bench.shaped_link import PREFIX, LinkShape, ShapedLink, has_netem, run_on_both, shaped_link, sweep
from lmworks.plan.devices.alpha_beta import Regime
from lmworks.spec import LMWorksError, SpecError
from typed import lmworks

SIZES = (4096, 65536, 262144, 1048576)


def joined(text: str) -> Iterator[ShapedLink]:
    """Skipped only where the kernel, or a container, has no network namespaces for us."""
    try:
        link = shaped_link(LinkShape.parse(text))
        shaped = link.__enter__()
    except LMWorksError as refused:
        pytest.skip(str(refused))
    try:
        yield shaped
    finally:
        link.__exit__(None, None, None)


@pytest.fixture(scope="module")
def fast() -> Iterator[ShapedLink]:
    yield from joined("80mbit")


@pytest.fixture(scope="module")
def far() -> Iterator[ShapedLink]:
    yield from joined("80mbit,20ms")


def sends(link: ShapedLink, rounds: int = 5) -> tuple[list[Row], Regime]:
    rows = measure(Sweep("cpu", SIZES, ops=("send",), point_s=0.2, rounds=rounds), 2, 2, link.enter)
    (fitted,) = fits_of(rows)
    return rows, fitted[1].last


def test_the_fit_finds_the_planted_bandwidth(fast: ShapedLink) -> None:
    rows, fit = sends(fast)
    assert fast.how == {"bandwidth": "tc tbf on a veth pair"}
    assert fit.beta == pytest.approx(8 / 80e6, rel=0.1)
    assert not any(row.wrong for row in rows)


@pytest.mark.slow  # the bandwidth alone is found below
def test_the_fit_finds_the_planted_delay_and_bandwidth(far: ShapedLink) -> None:
    rows, fit = sends(far)
    netem = has_netem(far.nodes[0].namespace)
    assert ("netem" in far.how["delay"] and "relay" not in far.how["delay"]) == netem
    assert fit.alpha == pytest.approx(20e-3, rel=0.1)
    assert fit.beta == pytest.approx(8 / 80e6, rel=0.1)
    assert not any(row.wrong for row in rows)


def test_lost_packets_are_sent_again() -> None:
    for link in joined("200mbit,1ms,3%"):
        rows = measure(Sweep("cpu", (1048576,), ops=("all-reduce",), point_s=0.0, rounds=3), 2, 2, link.enter)
        assert not any(row.wrong for row in rows)
        counters = Path("/proc/net/snmp")
        said = subprocess.run(link.nodes[0].command("cat", str(counters)), capture_output=True, text=True).stdout
        names, values = (line.split() for line in said.splitlines() if line.startswith("Tcp:"))
        assert int(dict(zip(names, values, strict=True))["RetransSegs"]) > 3
        assert set(link.how) == {"bandwidth", "delay", "loss"}


def test_each_node_has_a_rank_of_its_own(fast: ShapedLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os; open(os.environ['PLACE'] + '/' + os.environ['RANK'], 'w').write("
        "' '.join(os.environ[name] for name in ('WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')))"
    )
    monkeypatch.setenv("PLACE", str(tmp_path))
    assert run_on_both(fast, [sys.executable, "-c", script]) == [0, 0]
    first, second = fast.nodes
    assert (tmp_path / "0").read_text() == f"2 0 {first.address} {first.interface}"
    assert (tmp_path / "1").read_text() == f"2 0 {first.address} {second.interface}"
    assert run_on_both(fast, [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']))"], 2) == [
        0,
        1,
        2,
        3,
    ]


def test_nodes_share_no_interface(fast: ShapedLink) -> None:
    for mine, other in (fast.nodes, fast.nodes[::-1]):
        seen = subprocess.run(mine.command("ip", "-o", "-4", "address"), capture_output=True, text=True).stdout
        assert mine.address in seen and other.address not in seen
        assert seen.count("inet") == 2  # and its own loopback


def names() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return set(re.findall(rf"^{PREFIX}-\S+", listed, re.MULTILINE))


def test_nothing_is_left_behind() -> None:
    before = names()
    for link in joined("1gbit,1ms"):
        assert names() - before == {node.namespace for node in link.nodes} - before
    assert names() == before
    subprocess.run(["ip", "netns", "add", f"{PREFIX}-4194305-0-0"], check=True)  # of a process that cannot be
    sweep()
    assert names() == before


def test_shapes() -> None:
    assert LinkShape.parse("200mbit,5ms,0.1%") == LinkShape(200e6, 5e-3, 0.001)
    assert LinkShape.parse("1.5 Gbit, 250us") == LinkShape(1.5e9, 250e-6)
    assert str(LinkShape(1.5e9, 250e-6, 0.02)) == "1.5gbit,0.25ms,2%"
    for bad, why in (
        ("1gbit,1gbit", "said twice"),
        ("0mbit", "missing"),
        ("1mbit,60%", "loss below 50%"),
        ("", "is no"),
    ):
        with pytest.raises(SpecError, match=why):
            LinkShape.parse(bad)


@pytest.mark.slow  # calibration, collectives and two trainings: three minutes, with real-time priority
def test_steps_over_a_link_are_predicted_within_15_percent(
    far: ShapedLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    measure = importlib.import_module("shaped_link_cpu").measure
    found = measure("100mbit,5ms", 6, tmp_path, tmp_path / "link.png")
    assert [one["strategy"] for one in found["steps"]] == ["ddp", "fsdp2"]
    for one in found["steps"]:
        assert one["parts_s"]["communication"] > 0.8 * one["predicted_s"]  # not the machine
        assert abs(one["error"]) < 0.15, one
    assert all(abs(error) < 0.1 for error in found["error"].values()), found["error"]


def test_a_command_over_a_link(fast: ShapedLink, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = lmworks(capfd, "bench", "link", "1gbit", "--", "sh", "-c", "echo rank $RANK")
    assert code == 0 and out == "rank 0\n" and err == "bandwidth of the link: tc tbf on a veth pair\n"
    code, _, err = lmworks(capfd, "bench", "link", "1gbit", "--", "sh", "-c", "exit 3")
    assert code == 1 and "exit codes 3, 3, by rank" in err
