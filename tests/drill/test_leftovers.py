"""What drills started is ended when they are killed: stopped processes, and those that left their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.drill.leftovers import disk_name, marked

START = """
import os, signal, subprocess, sys, time
from lmworks.drill.leftovers import OWN_MARK, environment
stopped = subprocess.Popen(["sleep", "100"], env=environment())
os.kill(stopped.pid, signal.SIGSTOP)
subprocess.run(["sh", "-c", "setsid sleep 100 > /dev/null 2>&1 &"], env=environment())  # as a daemon does
subprocess.Popen(["sleep", "100"])  # not of a drill
print(OWN_MARK, flush=True)
time.sleep(100)
"""
FLEET = """
import os, signal, sys, time
from pathlib import Path
from lmworks.drill.leftovers import OWN_MARK
from lmworks.drill.local_fleet import LocalFleet, Shape, train_model
out = Path(sys.argv[1])
fleet = LocalFleet(out / "fleet", train_model(out / "model"), Shape(tenants=("blue",), redis=True, small_disk=True))
fleet.start()
fleet.signal(fleet.names[0], signal.SIGSTOP)
os.kill(fleet.engine(fleet.names[1]), signal.SIGSTOP)
print(OWN_MARK, flush=True)
time.sleep(1000)
"""


def killed(code: str, *words: str) -> str:
    """Runs it until it says its mark, and kills it with -9."""
    runner = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    mark = runner.stdout.readline().strip()
    assert len(marked(mark)) >= 2
    runner.kill()
    runner.wait()
    runner.stdout.close()
    return mark


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def children_named(name: str) -> set[int]:
    found = subprocess.run(["pgrep", "-x", name], capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in found.split()}


def test_a_killed_drill_leaves_nothing_that_it_started() -> None:
    before = children_named("sleep")
    mark = killed(START)
    assert soon(lambda: not marked(mark), 20)
    spared = [pid for pid in children_named("sleep") - before if Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert spared  # what bears no mark is nobody's business
    for pid in spared:
        os.kill(pid, signal.SIGKILL)


def test_an_engine_that_is_stopped_ends_with_its_server() -> None:
    code = (
        "import asyncio\nimport signal\n"
        "from lmworks.serve.channel import spawn\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # below nohup it is ignored from the start
        "async def main():\n"
        "    process, *_ = await spawn('lmworks.serve', 'worker')\n"
        "    print(process.pid, flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    assert soon(lambda: ignores(pid, signal.SIGHUP), 20)  # it is past its imports
    os.kill(pid, signal.SIGSTOP)
    server.kill()
    server.wait()
    server.stdout.close()
    assert soon(lambda: gone(pid), 30)


def ignores(pid: int, number: int) -> bool:
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def gone(pid: int) -> bool:
    """Ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_a_killed_drill_leaves_no_fleet(tmp_path: Path) -> None:
    """Its processes are stopped in part, Redis has left its parent, a disk is mounted."""
    mark = killed(FLEET, str(tmp_path))
    assert soon(lambda: not marked(mark) and disk_name(mark) not in Path("/proc/self/mounts").read_text(), 30)
