"""A cluster for tests: stand-ins for what Slurm puts on PATH, which start every node's command on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

# A node's command in the background for each node. SIGTERM goes to every process of a task, as Slurm's does: to the
# agent, which hands it on, and to the ranks as well.
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.1 "$@" >"node$node.log" 2>&1 &
  tasks+=($!)
done
stop() {
  for task in "${tasks[@]}"; do
    read -ra ranks <"/proc/$task/task/$task/children"
    kill -TERM "${ranks[@]}" "$task"
  done
}
trap stop TERM
worst=0
for task in "${tasks[@]}"; do
  while true; do
    status=0
    wait "$task" || status=$?
    kill -0 "$task" 2>/dev/null || break
  done
  ((status > worst)) && worst=$status
done
exit "$worst"
"""
SCONTROL = """\
#!/bin/bash
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >requeued ;;
esac
"""


def slurm(root: Path, nodes: int) -> dict[str, str]:
    """The environment of an sbatch script on `nodes` nodes, with srun and scontrol first on PATH."""
    tools = root / "bin"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(1000 + os.getpid()), "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": str(nodes)}
    return {**os.environ, **job, "PATH": path, "GLOO_SOCKET_IFNAME": "lo"}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that descend from it: torchrun's ranks outlive an agent that is killed."""
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in found:
        if process.poll() is None or pid != process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
