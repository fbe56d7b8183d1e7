"""An sbatch script: one torchrun agent a node, stopped with a checkpoint before the time is up, and queued again."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ..spec import SpecError
from ..spec.errors import PREEMPTED
from .job import Job, check_no_spaces, trap_signal, wait_for_child

FIXED = ("nodes", "N", "ntasks", "n", "ntasks-per-node", "gpus-per-node", "signal")  # options that the script sets
TIME = re.compile(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}")  # minutes, or [days-]hours:minutes:seconds


@dataclass(frozen=True)
class Allocation:
    """What to ask Slurm for; an empty string leaves the choice to the cluster."""

    time: str = ""
    partition: str = ""
    account: str = ""
    container: str = ""  # an image for the pyxis plugin (enroot)
    cpus_per_node: int = 0  # 0: whole nodes
    grace: int = 300  # seconds before the limit at which the run is asked to save and stop
    requeue: bool = True
    qos: str = ""
    lines: tuple[str, ...] = ()  # further #SBATCH options, e.g. --constraint=ib
    variables: tuple[str, ...] = ()  # NAME=VALUE, exported to every rank
    modules: tuple[str, ...] = ()  # environment modules, loaded before anything else


def slurm_script(job: Job, ask: Allocation) -> str:
    return "\n".join([*header(job, ask), "", *environment(ask), "", *start(job, ask), "", *finish(ask), ""])


def header(job: Job, ask: Allocation) -> list[str]:
    if ask.time and not TIME.fullmatch(ask.time):
        raise SpecError(f"--time {ask.time!r} is not a Slurm time; write [days-]hours:minutes:seconds, e.g. 1-12:00:00")
    options = {
        "job-name": job.label,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.per_node) if job.on_gpus else "",
        "cpus-per-task": str(ask.cpus_per_node) if ask.cpus_per_node else "",
        "time": ask.time,
        "partition": ask.partition and check_no_spaces("--partition", ask.partition),
        "account": ask.account and check_no_spaces("--account", ask.account),
        "qos": ask.qos and check_no_spaces("--qos", ask.qos),
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{ask.grace}",
    }
    switches = [*([] if ask.cpus_per_node else ["exclusive"]), "requeue" if ask.requeue else "no-requeue"]
    return [
        "#!/bin/bash",
        f"# Run '{job.label}' on {job.nodes} × {job.per_node} ranks. Submit it with: sbatch THIS-FILE",
        *(f"#SBATCH --{name}={value}" for name, value in options.items() if value),
        *(f"#SBATCH --{name}" for name in switches),
        *(f"#SBATCH {sbatch_option(line)}" for line in ask.lines),  # last: of two alike the second counts
        "",
        "set -euo pipefail",
    ]


def sbatch_option(line: str) -> str:
    """One more option of sbatch, with or without the directive in front of it."""
    option = line.strip().removeprefix("#SBATCH").strip()
    name = re.match(r"--?([A-Za-z][A-Za-z-]*)", option)
    if not name or not option.isprintable():
        raise SpecError(f"--sbatch-line {line!r} is not an option of sbatch on one line, e.g. --constraint=ib")
    if name[1] in FIXED:
        raise SpecError(f"--sbatch-line {line!r}: the script sets its own --{name[1]}; see lmworks launch slurm -h")
    return option


def exported(variable: str) -> list[str]:
    """The value as it was given: nothing in it is expanded."""
    name, equals, value = variable.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
        raise SpecError(f"--env {variable!r} is not NAME=VALUE, e.g. NCCL_DEBUG=INFO")
    literal = ["# shellcheck disable=SC2016"] if set(value) & set("$`") else []
    return [*literal, f"export {name}={shlex.quote(value)}"]


def environment(ask: Allocation) -> list[str]:
    modules = [
        "# What sets modules up may read variables that are not set.",
        "set +u",
        *(f"module load {shlex.quote(check_no_spaces('--module', module))}" for module in ask.modules),
        "set -u",
        "",
    ]
    return [
        *(modules if ask.modules else []),
        "# One thread a rank for what runs on the CPU: ranks share the cores of a node.",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        "# A rank whose neighbour died raises instead of waiting for ever.",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "# How long an agent waits for its ranks to save after a signal, before it kills them.",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(ask.grace - 30, 30)}",
        "# Uncomment what your network needs:",
        "# export NCCL_SOCKET_IFNAME=ib0    # the interface of NCCL's first contact (and its traffic without RDMA)",
        "# export GLOO_SOCKET_IFNAME=ib0    # the same for gloo: CPU ranks and checkpoints",
        "# export NCCL_IB_HCA=mlx5          # which InfiniBand or RoCE adapters to use",
        "# export NCCL_DEBUG=INFO           # what NCCL chose, and why",
        *(line for variable in ask.variables for line in exported(variable)),
    ]


def start(job: Job, ask: Allocation) -> list[str]:
    again = shlex.join(["lmworks", "resume", job.run_dir])
    first = shlex.join(["lmworks.train", job.source, *job.overrides, "--run-dir", job.run_dir])
    container = (
        ['  --container-image="$image" --container-mounts="$PWD:$PWD" --container-workdir="$PWD" \\']
        if ask.container
        else []
    )
    return [
        "# A job that comes back from the queue goes on with the run that it began.",
        f"if [[ -e {shlex.quote(job.run_dir + '/spec.toml')} ]]; then",
        f"  work=({again})",
        "else",
        f"  work=({first})",
        "fi",
        *([f"image={shlex.quote(ask.container)}"] if ask.container else []),
        "",
        "# The agents meet on the first node, at a port that follows from the job: two jobs on a node do not collide.",
        'first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        "mkdir -p logs",
        "",
        "# What every node runs; $SLURM_NODEID and $SLURMD_NODENAME are known only there.",
        "# shellcheck disable=SC2016",
        'agent=\'torchrun --rdzv-conf is_host=$((SLURM_NODEID == 0)) --local-addr "$SLURMD_NODENAME" "$@"\'',
        "",
        f"# {ask.grace} s before the limit Slurm sends USR1 to this script. It asks all ranks to save and stop:",
        "# srun hands SIGTERM on to its tasks.",
        *trap_signal("USR1", "step"),
        "",
        "# Once a node has ended, the others have two minutes: to end too, or to finish writing.",
        "srun --kill-on-bad-exit=0 --wait=120 --cpu-bind=none --open-mode=append \\",
        '  --output="logs/%x-%j-node%n.log" \\',
        *container,
        '  bash -c "$agent" agent \\',
        f"  --nnodes {job.nodes} --nproc-per-node {job.per_node} --max-restarts {job.spec.fault.max_restarts} \\",
        '  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:$port" \\',
        '  -m "${work[@]}" &',
    ]


def finish(ask: Allocation) -> list[str]:
    """Before the limit Slurm sends USR1 to this script alone, which so knows why the run ended."""
    again = [
        f"if ((status == {PREEMPTED})); then",
        '  echo "the time is nearly up: the run has saved itself and is queued again"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
    return [
        *wait_for_child("step"),
        *(again if ask.requeue else []),
        'exit "$status"',
    ]
