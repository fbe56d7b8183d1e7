"""A limit of address space (`ulimit -v`, `-d`) that is too small for PyTorch: one line instead of a crash.

Libraries that cannot map memory while they are loaded end the process in many ways: an ImportError, an abort, a
segmentation fault. Where there is a limit, a child process loads the library first and reports what is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

from ..plan.memory.host import process_bytes
from ..spec import SpecError

MIB = 2**20
RUNTIME = 384 * MIB  # that a run maps beside its threads: modules, libraries and buffers loaded later
THREAD = 128 * MIB  # an arena of glibc's allocator and a stack
# Library → a program that prints how much of the address space is left, less what the library takes later.
PROBES = {
    "numpy": "import numpy; print(0)",
    "torch": "import torch; from lmworks.plan.memory.host import process_bytes as left; "
    f"print(left() - {RUNTIME} - {THREAD} * torch.get_num_threads())",
}


class AddressSpaceCheck(MetaPathFinder):
    """Runs a probe when its library is imported: commands that do without it need less."""

    def __init__(self) -> None:
        self.probes = {name: probe for name, probe in PROBES.items() if name not in sys.modules}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if probe := self.probes.pop(fullname, None):
            refuse_small_address_space(probe)
        return None


def check_address_space() -> None:
    """Install the check, where this process has a limit. Ranks have the limits of the process that started them."""
    if "RANK" not in os.environ and process_bytes() is not None:
        sys.meta_path.insert(0, AddressSpaceCheck())


def refuse_small_address_space(probe: str) -> None:
    there = process_bytes()
    if there is None:
        return
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    left = None if ended.returncode else int(ended.stdout)
    if left is not None and left >= 0:
        return
    missing = "more" if left is None else f"about {-left / MIB:,.0f} MiB more"
    raise SpecError(
        f"the limit of this process (ulimit -v or -d) leaves it {there / MIB:,.0f} MiB of address space, and PyTorch "
        f"with its threads needs {missing}; `ulimit -v unlimited` lifts it, OMP_NUM_THREADS=1 needs less"
    )
