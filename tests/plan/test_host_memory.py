"""What a machine has left: MemAvailable, or less where a container or a job is limited; and who is refused by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmworks.parallel.preflight import check_host_memory, check_requirements
from lmworks.plan.memory import host
from lmworks.plan.memory.host_need import HostNeed, machine_need, refusal
from lmworks.spec import RunSpec, SpecError, load_run
from typed import lmworks

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


# --- before anything is taken ---------------------------------------------------------------------------

MIB = 2**20
RUN = ("model.layers=4", "data.micro_batch=24", "data.seq=256")
SENT = "parallel.offload_activations=1"
STATES, ASYNC = "parallel.offload=optimizer", "checkpoint.asynchronous=true"
CPU = torch.device("cpu")


def run_of(*words: str) -> RunSpec:
    """cpu-10m with 4 blocks, of which two may send: 6,144 tokens × 256 × 4 B = 6 MiB is what a block takes in."""
    return load_run("cpu-10m", [*RUN, *words])


def start(*words: str) -> None:
    check_host_memory(run_of(*words), CPU)


def refused(*words: str) -> str:
    with pytest.raises(SpecError) as error:
        start(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


def give(machine: Path, size: int) -> None:
    write(machine / "proc", {"meminfo": f"MemAvailable:  {size // 1024} kB\n"})


def test_as_much_as_will_wait_must_be_free(machine: Path) -> None:
    give(machine, 12 * MIB)
    start(SENT, "parallel.recompute=full")
    give(machine, 12 * MIB - 1024)
    assert refused(SENT, "parallel.recompute=full") == (
        "parallel.offload_activations = 1 needs 0.0117 GiB of host memory, and 0.0117 GiB are free; nothing worth the "
        "way would fit, and parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    )


def test_a_block_that_keeps_all_sends_more(machine: Path) -> None:
    give(machine, 12 * MIB)
    assert "GiB of host memory, and 0.0117 GiB are free" in refused(SENT)


def test_ranks_of_one_machine_share_its_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever started them says, and as the spec does where nobody did."""
    full = (SENT, "parallel.recompute=full")
    give(machine, 24 * MIB)
    start(*full, "parallel.dp=2")
    assert "for each of the 4 ranks on this machine" in refused(*full, "parallel.dp=4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    start(*full, "parallel.dp=4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert "for each of the 3 ranks on this machine" in refused(*full, "parallel.dp=4")


def test_what_would_fit_is_said(machine: Path) -> None:
    give(machine, 5 * GIB // 4)
    words = ("data.micro_batch=256", "parallel.dp=2")
    said = refused(*words, "parallel.offload_activations=3")
    assert "4.01 GiB in all, and 1.25 GiB are free; parallel.offload_activations = 0.6 would fit, and" in said
    start(*words, "parallel.offload_activations=0.6")


def test_where_nobody_knows_it_is_tried(machine: Path) -> None:
    (machine / "proc" / "meminfo").unlink()
    start(SENT, STATES, ASYNC)


def test_a_run_that_keeps_nothing_there_asks_nobody(machine: Path) -> None:
    give(machine, 0)
    start()


@pytest.mark.parametrize(
    "layout", [(), ("parallel.dp=2",), ("parallel.dp=2", "parallel.strategy=fsdp2")], ids=["alone", "ddp", "fsdp2"]
)
@pytest.mark.parametrize(
    ("word", "key", "instead"),
    [
        (STATES, "parallel.offload = 'optimizer' needs", "parallel.offload = 'none' would fit"),
        (ASYNC, "checkpoint.asynchronous = true needs", "checkpoint.asynchronous = false would fit"),
    ],
    ids=["states", "staging"],
)
def test_states_and_copies_of_saves_must_be_free_too(
    machine: Path, layout: tuple[str, ...], word: str, key: str, instead: str
) -> None:
    need = machine_need(run_of(word, *layout), range(2 if layout else 1), "cpu").total
    give(machine, need + 1023)
    start(word, *layout)
    give(machine, need - 1024)
    said = refused(word, *layout)
    assert said.startswith(key) and said.endswith(f" GiB are free; {instead}")


def test_all_that_is_kept_there_counts_together(machine: Path) -> None:
    """Each alone would have room. What is said to fit does."""
    words = ("data.micro_batch=256", "parallel.offload_activations=0.5", STATES, ASYNC)
    need = machine_need(run_of(*words), [0], "cpu")
    give(machine, need.total - need.staging + 1023)
    said = refused(*words)
    assert said.startswith(
        "parallel.offload = 'optimizer', parallel.offload_activations = 0.5 and checkpoint.asynchronous = true need "
    )
    assert (
        "; parallel.offload = 'none' or checkpoint.asynchronous = false or parallel.offload_activations = 0.4" in said
    )
    for change in ("parallel.offload=none", "checkpoint.asynchronous=false", "parallel.offload_activations=0.4"):
        start(*words, change)

    give(machine, min(need.states, need.staging) - 1024)
    said = refused(STATES, ASYNC)
    assert said.endswith("; parallel.offload = 'none' and checkpoint.asynchronous = false together would fit")


def test_a_run_is_refused_before_anything_is_laid_out(machine: Path) -> None:
    give(machine, MIB)
    with pytest.raises(SpecError, match=r"checkpoint\.asynchronous = false would fit"):
        check_requirements(run_of(ASYNC), CPU)


def test_a_plan_for_this_machine_says_so(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one for another: what that has is not known."""
    words = ("plan", "cpu-10m", *RUN, STATES, ASYNC, "--no-probe")
    told = json.loads(lmworks(capsys, *words, "--json")[1])
    assert (told["host_available_bytes"], told["host_fits"]) == (48 * GIB, True)
    assert "GiB a rank; 48.0 GiB are free here" in lmworks(capsys, *words)[1]

    give(machine, MIB)
    code, out, _ = lmworks(capsys, *words)
    assert code == 0 and f"it would be refused on this machine: {refused(STATES, ASYNC)}\n" in out
    assert json.loads(lmworks(capsys, *words, "--json")[1])["host_fits"] is False

    elsewhere = json.loads(lmworks(capsys, *words, "cluster.gpu=h100", "--json")[1])
    assert elsewhere["host_available_bytes"] is elsewhere["host_fits"] is None


def test_much_is_written_out() -> None:
    """Llama 3 70B: 70,553,706,496 weights of 12 bytes."""
    spec = load_run("llama3-70b", [ASYNC])
    need = machine_need(spec, [0], "cuda")
    assert "needs 788 GiB of host memory, and 750 GiB are free;" in refusal(spec, need, 1, 750 * GIB)
    assert "needs 1,577 GiB of" in refusal(spec, HostNeed(staging=2 * need.staging), 1, 0)


def test_another_machine_s_ranks_are_not_counted(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline the last ranks hold the head: on the second machine that is what must have room."""
    words = ("parallel.pp=4", "data.global_batch=96", STATES, "model.tie_embeddings=false", "model.layers=5")
    first, second = (machine_need(run_of(*words), ranks, "cpu").total for ranks in ((0, 1), (2, 3)))
    assert first != second
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    give(machine, min(first, second) + 1023)
    outcomes = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        try:
            start(*words)
            outcomes.append("starts")
        except SpecError:
            outcomes.append("refused")
    assert outcomes == (["starts"] * 2 + ["refused"] * 2 if first < second else ["refused"] * 2 + ["starts"] * 2)
