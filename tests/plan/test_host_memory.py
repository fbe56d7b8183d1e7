"""What a machine has left: MemAvailable, or less where a container or a job is limited."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.plan.memory import host
from lmworks.spec import RunSpec, load_run

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 GiB, of which 48 are available, and no control groups."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    meminfo = f"MemTotal:  {64 * 2**20} kB\nMemFree:  {2**20} kB\nMemAvailable:  {48 * 2**20} kB\nHugePages_Total:  0\n"
    write(tmp_path / "proc", {"meminfo": meminfo})
    return tmp_path


def write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}", encoding="ascii")


def unified(folder: Path, limit: object, used: int, cached: int = 0) -> None:
    stat = f"anon {used - cached}\nactive_file {cached // 4}\ninactive_file {cached - cached // 4}\nslab 7\n"
    write(folder, {"memory.max": limit, "memory.current": used, "memory.stat": stat})


def test_a_machine_without_limits_has_what_is_available(machine: Path) -> None:
    assert host.available_bytes() == 48 * GIB
    write(machine / "proc" / "self", {"cgroup": "0::/user.slice\n"})  # a group without a memory controller
    assert host.available_bytes() == 48 * GIB


def test_nobody_knows_where_the_system_does_not_tell(machine: Path) -> None:
    (machine / "proc" / "meminfo").write_text("MemTotal:  1 kB\n")
    assert host.available_bytes() is None
    (machine / "proc" / "meminfo").unlink()
    assert host.available_bytes() is None


def test_the_lowest_limit_on_the_way_down_counts(machine: Path) -> None:
    """Of a Slurm step: its job's. What the page cache holds is given up."""
    write(machine / "proc" / "self", {"cgroup": "0::/slurm/job_7/step_0\n"})
    unified(machine / "cgroup" / "slurm", "max", 60 * GIB)
    unified(machine / "cgroup" / "slurm" / "job_7", 20 * GIB, 8 * GIB, cached=4 * GIB)
    unified(machine / "cgroup" / "slurm" / "job_7" / "step_0", 40 * GIB, 2 * GIB)
    assert host.available_bytes() == 16 * GIB


def test_a_limit_above_what_the_machine_has_changes_nothing(machine: Path) -> None:
    write(machine / "proc" / "self", {"cgroup": "0::/\n"})
    unified(machine / "cgroup", 100 * GIB, 0)
    assert host.available_bytes() == 48 * GIB


def test_a_group_over_its_limit_has_nothing(machine: Path) -> None:
    write(machine / "proc" / "self", {"cgroup": "0::/\n"})
    unified(machine / "cgroup", GIB, 2 * GIB)
    assert host.available_bytes() == 0


@pytest.mark.parametrize("path", ["/docker/af3", "/"], ids=["as the machine names it", "as it sees it"])
def test_version_1_of_a_container(machine: Path, path: str) -> None:
    """Its own group is what is mounted; other controllers have other groups."""
    lines = f"11:devices:/elsewhere\n4:cpu,memory:{path}\n1:name=systemd:/x\n0::/\n"
    write(machine / "proc" / "self", {"cgroup": lines})
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    sizes = {"memory.limit_in_bytes": 12 * GIB, "memory.usage_in_bytes": 5 * GIB, "memory.stat": stat}
    write(machine / "cgroup" / "memory", sizes)
    assert host.available_bytes() == 9 * GIB


def test_ranks_that_share_a_machine() -> None:
    def ranks(*words: str) -> int:
        spec: RunSpec = load_run("cpu-10m", words)
        return host.ranks_on_host(spec)

    assert ranks() == 1
    assert ranks("parallel.dp=4") == 4  # all of them, where no cluster is described
    assert ranks("parallel.dp=4", "cluster.nodes=2", "cluster.gpus_per_node=2") == 2
