"""What a machine has left: MemAvailable, or less where a container or a job is limited."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.model import GPT
from lmworks.parallel.recompute import offload_activations
from lmworks.plan.memory import host
from lmworks.spec import RunSpec, SpecError, load_run

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


# --- before anything is pinned --------------------------------------------------------------------------

MIB = 2**20
RUN = ("model.layers=4", "data.micro_batch=24", "data.seq=256", "parallel.offload_activations=1")


def lay(*words: str) -> GPT:
    """cpu-10m with 4 blocks, of which two may send: 6,144 tokens × 256 × 4 B = 6 MiB is what a block takes in."""
    spec = load_run("cpu-10m", [*RUN, *words])
    part = GPT(spec.model)
    part.recompute = spec.parallel.recompute
    offload_activations(part, spec, torch.device("cpu"))
    return part


def give(machine: Path, size: int) -> None:
    write(machine / "proc", {"meminfo": f"MemAvailable:  {size // 1024} kB\n"})


def test_as_much_as_will_wait_must_be_free(machine: Path) -> None:
    give(machine, 12 * MIB)
    assert lay("parallel.recompute=full").offload is not None
    give(machine, 12 * MIB - 1024)
    with pytest.raises(SpecError) as refused:
        lay("parallel.recompute=full")
    assert str(refused.value) == (
        "parallel.offload_activations = 1 needs 0.0117 GiB of host memory, and 0.0117 GiB are free; nothing worth the "
        "way would fit, and parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    )


def test_a_block_that_keeps_all_sends_more(machine: Path) -> None:
    give(machine, 12 * MIB)
    with pytest.raises(SpecError, match=r"needs 0\.1\d+ GiB of host memory, and 0\.0117 GiB are free"):
        lay()


def test_ranks_of_one_machine_share_its_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever started them says, and as the spec does where nobody did."""
    give(machine, 24 * MIB)
    assert lay("parallel.recompute=full", "parallel.dp=2").offload is not None
    with pytest.raises(SpecError, match="for each of the 4 ranks on this machine"):
        lay("parallel.recompute=full", "parallel.dp=4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert lay("parallel.recompute=full", "parallel.dp=4").offload is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(SpecError, match="for each of the 3 ranks on this machine"):
        lay("parallel.recompute=full", "parallel.dp=4")


def test_what_would_fit_is_said(machine: Path) -> None:
    give(machine, 5 * GIB // 4)
    with pytest.raises(SpecError, match=r"4\.01 GiB in all, and 1\.25 GiB are free; 0\.6 would fit"):
        lay("data.micro_batch=256", "parallel.dp=2", "parallel.offload_activations=3")
    assert lay("data.micro_batch=256", "parallel.dp=2", "parallel.offload_activations=0.6").offload is not None


def test_where_nobody_knows_it_is_tried(machine: Path) -> None:
    (machine / "proc" / "meminfo").unlink()
    assert lay().offload is not None
