"""Builds C++ and CUDA sources into a library in the cache, once for all processes that share it.

A library is cached under a key of all that determines it: sources, flags, PyTorch, compilers, processor. While one
process builds, others wait for a file lock, which the system releases even after kill -9 (the lock of cpp_extension is
a file that would remain). An interrupted build is repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ...spec import LMWorksError
from ...spec.files import cache_root, write_whole

CPP_FLAGS = ("-O3", "-march=native", "-fopenmp-simd")
CUDA_FLAGS = ("-O3",)
DONE = "done"  # marks a complete library


@dataclass(frozen=True)
class Build:
    """What is built: the CUDA sources only if there are a GPU and nvcc."""

    name: str
    sources: tuple[Path, ...]
    compilers: tuple[str, ...]  # commands, in shell syntax

    @property
    def cuda(self) -> bool:
        return any(source.suffix == ".cu" for source in self.sources)

    @property
    def key(self) -> str:
        digest = hashlib.blake2b(digest_size=10)
        made_for = (torch.__version__, torch.version.cuda, CPP_FLAGS, CUDA_FLAGS, processor(), devices())
        for part in (repr(made_for), *map(version_of, self.compilers)):
            digest.update(part.encode() + b"\0")
        for source in self.sources:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return digest.hexdigest()

    @property
    def folder(self) -> Path:
        return cache_root() / "native" / f"{self.name}-{self.key}"

    @property
    def library(self) -> Path:
        return self.folder / f"{self.name}.so"


def plan_build(name: str, sources: Sequence[Path]) -> Build:
    """What can be built of these sources here; raises if a compiler or ninja is missing."""
    program, *rest = cxx_command()
    path = shutil.which(program)
    if path is None:
        raise LMWorksError(
            f"{name} is built from C++ on first use, and there is no compiler '{program}' "
            "here: install one (Debian: apt install g++) or name it in CXX; the other implementations need none"
        )
    compiler = shlex.join([path, *rest])
    if rest and (asked := run_version(compiler)).returncode:
        said = (asked.stderr or asked.stdout).strip().partition("\n")[0] or f"exit code {asked.returncode}"
        raise LMWorksError(
            f"{name} is built from C++ on first use, and '{shlex.join([program, *rest])}', which CXX names, does not "
            f"run ({said}): install what is missing, or name another compiler; the other implementations need none"
        )
    if shutil.which("ninja") is None:
        raise LMWorksError(
            f"{name} is built from C++ on first use, and PyTorch builds with ninja, which is not on the PATH: "
            "pip install ninja; the other implementations need none"
        )
    nvcc = cuda_compiler()
    if nvcc is None:
        return Build(name, tuple(source for source in sources if source.suffix != ".cu"), (compiler,))
    return Build(name, tuple(sources), (compiler, shlex.quote(nvcc)))


def cxx_command() -> list[str]:
    """One word or several: CXX may hold a wrapper and options, as in "ccache g++ -m64"."""
    from torch.utils import cpp_extension

    given = cpp_extension.get_cxx_compiler()
    if shutil.which(given):  # a path may have spaces
        return [given]
    try:
        return shlex.split(given) or [given]
    except ValueError as error:
        raise LMWorksError(f"CXX = {given!r} is not a command ({error}): write it as for a shell, e.g. g++") from None


def cuda_compiler() -> str | None:
    """nvcc, if this PyTorch sees a GPU."""
    from torch.utils import cpp_extension

    if not torch.cuda.is_available() or cpp_extension.CUDA_HOME is None:
        return None
    return shutil.which("nvcc", path=os.path.join(cpp_extension.CUDA_HOME, "bin"))


def load_library(build: Build) -> None:
    """Load the library, after building it if necessary."""
    try:
        build.folder.mkdir(parents=True, exist_ok=True)
        (build.folder / ".lock").touch()
    except OSError as error:
        raise LMWorksError(
            f"{build.name} is built from C++ on first use, and {build.folder} cannot be written "
            f"({error.strerror}); name another folder in LMWORKS_CACHE"
        ) from None
    with open(build.folder / ".lock", "a") as lock:  # opened to write, as network file systems require for locks
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ((build.folder / DONE).exists() and build.library.exists()):
            compile_sources(build)
            write_whole(build.folder / DONE, "\n".join(map(str, build.compilers)) + "\n")
    try:
        torch.ops.load_library(build.library)
    except OSError as error:
        raise LMWorksError(
            f"{build.library} cannot be loaded ({error.__cause__ or error}); remove its folder, and it is built again"
        ) from None


def compile_sources(build: Build) -> None:
    from torch.utils import cpp_extension

    (build.folder / "lock").unlink(missing_ok=True)  # cpp_extension's lock, left by a killed build: we hold our own
    # cpp_extension would not repeat a failed build in one process, and would number changed sources.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(build.name, None)
    try:
        with cxx_as_one_program(build.folder):
            cpp_extension.load(
                build.name,
                [str(source) for source in build.sources],
                extra_cflags=list(CPP_FLAGS),
                extra_cuda_cflags=list(CUDA_FLAGS),
                build_directory=str(build.folder),
                is_python_module=False,
            )
    except (RuntimeError, OSError) as error:
        log = build.folder / "build.log"
        log.write_text(str(error), encoding="utf-8")
        said = [line.strip() for line in str(error).splitlines() if "error" in line.lower()]
        reason = next((line for line in said if ": error" in line or ": fatal error" in line), (said or ["failed"])[-1])
        raise LMWorksError(f"{build.name} could not be built ({reason}); the compiler's output is in {log}") from None


@contextmanager
def cxx_as_one_program(folder: Path) -> Iterator[None]:
    """PyTorch expects CXX to be one program: a command of several words is wrapped in a script."""
    words = cxx_command()
    if len(words) == 1:
        yield
        return
    script = folder / "cxx"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    given, os.environ["CXX"] = os.environ["CXX"], str(script)
    try:
        yield
    finally:
        os.environ["CXX"] = given


def version_of(compiler: str) -> str:
    """The command and the output of --version."""
    return f"{compiler}\n{run_version(compiler).stdout}"


def run_version(compiler: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)


def processor() -> str:
    """What -march=native compiles for: machines that share a cache may differ in it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    kept = ("vendor_id", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)})) or platform.processor()


def devices() -> tuple[tuple[int, int], ...]:
    """Compute capabilities of the GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(count)}))
