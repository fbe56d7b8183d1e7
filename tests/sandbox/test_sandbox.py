"""The sandbox as it is used: results, batches, isolation that is not there, and a caller that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel import KINDS, refusal, skip_refused

from lmworks.sandbox import (
    Limits,
    Program,
    Sandbox,
    SandboxError,
    describe_isolation,
    linux,
    run_program,
    run_programs,
)
from lmworks.sandbox.confine import OWN_USERS, switch_user
from lmworks.sandbox.isolation import choose
from lmworks.sandbox.processes import descendants
from lmworks.sandbox.seccomp import KERNEL
from lmworks.sandbox.worker import Worker
from lmworks.spec.errors import SpecError

ROOT = Path(__file__).parent.parent.parent


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    skip_refused(request.param)
    with Sandbox(workers=1, isolation=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def kept() -> Iterator[Callable[[str], Sandbox]]:
    """A sandbox of a kind, made once."""
    made: dict[str, Sandbox] = {}

    def of(kind: str) -> Sandbox:
        skip_refused(kind)
        return made.get(kind) or made.setdefault(kind, Sandbox(1, kind))

    yield of
    for sandbox in made.values():
        sandbox.close()


def test_a_program_with_input_and_files(sandbox: Sandbox) -> None:
    source = (
        "import sys\nfrom pkg.part import value\nprint(value, sys.stdin.read())\n"
        "print('bad', file=sys.stderr)\nsys.exit(3)"
    )
    files = {"pkg/part.py": "value = open('data.txt').read()", "data.txt": "7"}
    result = sandbox.run(Program(source, stdin="grüß", files=files))
    assert (result.exit_code, result.signal, result.limit) == (3, None, None)
    assert result.stdout == "7 grüß\n".encode() and result.stderr == b"bad\n" and not result.ok
    assert result.isolation == sandbox.isolation.kind


def test_source_runs_as_python_would_run_it(sandbox: Sandbox) -> None:
    source = (
        "import sys, atexit, threading, __main__\n"
        "assert __name__ == '__main__' and __main__.__file__ == __file__ and sys.argv == ['main.py']\n"
        "class Local: pass\n"
        "import pickle; pickle.loads(pickle.dumps(Local()))\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Timer(0.05, print, ['thread']).start()\n"
        "def fail(): raise ValueError('here')\n"
        "fail()\n"
    )  # fmt: skip
    result = sandbox.run(Program(source))
    assert result.exit_code == 1 and result.text == "thread\nat exit\n"
    lines = result.stderr.decode().splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: here"
    assert lines[1].endswith('main.py", line 8, in <module>') and lines[2].strip() == "fail()"
    assert len([line for line in lines if line.startswith("  File")]) == 2  # no frame of ours
    for code, end in (("raise SystemExit", 0), ("exit('no')", 1), ("quit(300)", 44), ("import sys; sys.exit(None)", 0)):
        assert sandbox.run(Program(code)).exit_code == end
    assert b"SyntaxError" in sandbox.run(Program("def")).stderr


def test_the_same_program_gives_the_same_answer(sandbox: Sandbox) -> None:
    source = "print(hash('word'), set('abcdefgh'))"
    assert sandbox.run(Program(source)).stdout == sandbox.run(Program(source)).stdout


def test_commands(sandbox: Sandbox) -> None:
    script = 'cat; [ "$HOME" = "$PWD" ] && echo home >&2; kill -9 $$'
    result = sandbox.run(Program(["sh", "-c", script], stdin="text"))
    assert (result.stdout, result.stderr) == (b"text", b"home\n")
    assert (result.exit_code, result.signal, result.limit) == (None, 9, None)
    assert sandbox.run(Program(["python3", "-c", "print(1)"])).stdout == b"1\n"
    assert sandbox.run(Program(["no-such-command"])).exit_code == 127


@pytest.mark.parametrize(
    "source",
    [
        "import tempfile\nwith tempfile.TemporaryDirectory() as folder: open(folder + '/x', 'w').write('y')",
        "import os\nopen('x', 'w').write('1'); os.rename('x', 'y'); os.mkdir('z'); os.truncate('y', 0); os.remove('y')",
        "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout",
        "import subprocess\nassert subprocess.run(['ls'], stdout=subprocess.DEVNULL).returncode == 0",
        "import multiprocessing as mp\n"
        "def f(x, q): q.send(x * x)\n"
        "if __name__ == '__main__':\n  a, b = mp.Pipe(); p = mp.Process(target=f, args=(3, b)); p.start()\n"
        "  assert a.recv() == 9; p.join()",
        "import asyncio\nassert asyncio.run(asyncio.sleep(0.01, 7)) == 7",
        "import subprocess\np = subprocess.Popen(['sleep', '100']); p.terminate(); assert p.wait() == -15",
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor(4) as p: assert sum(p.map(abs, range(9))) == 36",
        "import os, random, uuid\nrandom.random(); uuid.uuid4(); os.urandom(8); open('/dev/urandom', 'rb').read(1)",
    ],
)
@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_ordinary_programs_work(source: str, kind: str, kept: Callable[[str], Sandbox]) -> None:
    result = kept(kind).run(Program(source))
    assert result.ok, result


def test_locks_of_multiprocessing_need_namespaces(kept: Callable[[str], Sandbox]) -> None:
    source = "import multiprocessing as mp\nq = mp.Queue(); q.put(7); assert q.get() == 7"
    assert kept("namespaces").run(Program(source)).ok
    assert not kept("landlock").run(Program(source)).ok
    assert any("locks of multiprocessing" in gap for gap in describe_isolation("landlock").gaps)


def test_all_that_is_visible_is_read_only(kept: Callable[[str], Sandbox]) -> None:
    """By the mounts themselves, so that it does not depend on whose files they are."""
    source = (
        "import os, sys\n"
        "paths = ['/', '/usr', '/etc', '/etc/ld.so.cache', '/dev', '/proc', sys.base_prefix, os.__file__]\n"
        "there = [path for path in paths if os.path.exists(path)]\n"
        "flags = [os.statvfs(path).f_flag for path in there]\n"
        "assert len(there) > 5 and all(one & os.ST_RDONLY and one & os.ST_NOSUID for one in flags), (there, flags)\n"
        "assert os.statvfs('.').f_flag & os.ST_NOSUID and sorted(os.listdir('/dev')) == "
        "['full', 'null', 'random', 'shm', 'urandom', 'zero']"
    )
    result = kept("namespaces").run(Program(source))
    assert result.ok, result


def test_no_namespace_is_shared_with_the_host(kept: Callable[[str], Sandbox]) -> None:
    kinds = ("mnt", "pid", "net", "ipc", "uts")
    source = f"import os\nprint([os.stat('/proc/self/ns/' + kind).st_ino for kind in {kinds}])"
    inside = json.loads(kept("namespaces").run(Program(source)).text)
    outside = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in kinds]
    assert len(set(inside) | set(outside)) == 2 * len(kinds)


def test_programs_of_one_folder_do_not_see_each_other(sandbox: Sandbox) -> None:
    if sandbox.isolation.kind != "seccomp":  # which writes nothing
        assert sandbox.run(Program("open('left', 'w').write('x')")).ok
    assert "left" not in sandbox.run(Program("import os; print(os.listdir())")).text


def test_time_is_measured(sandbox: Sandbox) -> None:
    slept = sandbox.run(Program("import time; time.sleep(0.3)"))
    assert 0.3 <= slept.wall_seconds < 3 and slept.cpu_seconds < 0.25
    children = (
        "import os, time\nfor _ in range(2):\n    if not os.fork():\n"
        "        while time.process_time() < 0.15: pass\n        os._exit(0)\nos.wait(); os.wait()"
    )
    assert 0.25 <= sandbox.run(Program(children)).cpu_seconds < 1.5


def test_a_batch_runs_side_by_side_and_in_order() -> None:
    started = time.monotonic()
    results = run_programs([f"import time; time.sleep(0.3); print({n})" for n in range(8)], workers=8)
    assert [result.text for result in results] == [f"{n}\n" for n in range(8)]
    assert time.monotonic() - started < 8 * 0.3


def test_wrong_requests_are_named() -> None:
    for files in ({"/etc/passwd": ""}, {"../up": ""}, {"a/../../b": ""}, {"main.py": ""}, {"": ""}):
        with pytest.raises(SpecError, match=r"Program\.files"):
            run_program("", files=files)
    with pytest.raises(SpecError, match=r"Limits\.cpu_seconds = 0"):
        Limits(cpu_seconds=0)
    with pytest.raises(SpecError, match=r"isolation = 'namespace'; did you mean 'namespaces'"):
        run_program("", isolation="namespace")


def test_files_that_do_not_fit_are_refused() -> None:
    skip_refused("namespaces")
    with pytest.raises(SandboxError, match="No space left"):
        run_program("", files={"large": "x" * 100_000}, limits=Limits(disk_bytes=8192), isolation="namespaces")


def test_the_filter_has_one_number_for_each_call() -> None:
    """A number typed twice denies one call and forgets another."""
    for column in (0, 1):
        numbers = [call[column] for call in KERNEL.values() if call[column] is not None]
        assert len(numbers) == len(set(numbers))


def run_python(code: str, *, python: str = sys.executable, source: Path = ROOT / "src", **options: object) -> dict:
    lines = ["import json, os, sys", f"sys.path.insert(0, {str(source)!r})", *code.splitlines()]
    done = subprocess.run([python, "-c", "\n".join(lines)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_where_namespaces_are_refused_landlock_is_used_and_says_so() -> None:
    """As in a container: unshare fails."""
    skip_refused("landlock")
    said = run_python(
        "from lmworks.sandbox import describe_isolation, linux, run_program, seccomp\n"
        "linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)\n"
        "seccomp.install([(seccomp.KERNEL['unshare'], [seccomp.fail(1)])])\n"
        "report = describe_isolation()\n"
        "print(json.dumps([report.kind, report.refused, run_program('print(1)').isolation]))"
    )
    assert said == ["landlock", ["namespaces: PermissionError: [Errno 1] unshare: Operation not permitted"], "landlock"]


def test_where_landlock_is_refused_too_nothing_is_written() -> None:
    skip_refused("seccomp")
    said = run_python(
        "from lmworks.sandbox import describe_isolation, linux, run_program, seccomp\n"
        "linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)\n"
        "seccomp.install([(seccomp.KERNEL['unshare'], [seccomp.fail(1)]), ((444, 444), [seccomp.fail(38)])])\n"
        "report = describe_isolation()\n"
        "result = run_program(\"open('x', 'w')\")\n"
        "print(json.dumps([report.kind, len(report.refused), 'Read-only' in result.stderr.decode()]))"
    )
    assert said == ["seccomp", 2, True]


ORDINARY = """
from lmworks.sandbox import Limits, Program, Sandbox, describe_isolation
bomb = Program("import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass")
made = {}
for kind in ("namespaces", "landlock", "seccomp"):
    with Sandbox(1, kind) as sandbox:
        program = "import os\\nprint(os.getuid())\\nopen('x', 'w')"
        made[kind] = [sandbox.isolation.user_namespace, sandbox.run(Program(program)).text,
                      sandbox.run(bomb, Limits(cpu_seconds=0.3)).limit,
                      sandbox.run(Program(f"import os; os.kill({os.getpid()}, 9)")).exit_code,
                      sandbox.run(Program(f"print(open('/proc/{os.getpid()}/environ').read())")).exit_code,
                      describe_isolation(kind).gaps]
print(json.dumps(made))
"""


def run_as(code: str, become: Callable[[], None]) -> dict:
    """In a process of root that has called `become`. The interpreter may lie in a home that is closed to others: it is
    bound to a place that is not, in a mount namespace of this process."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    for name in ("python", "source"):
        (place / name).mkdir()

    def prepare() -> None:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount(sys.base_prefix, str(place / "python"), None, linux.MS_BIND)
        linux.mount(str(ROOT / "src"), str(place / "source"), None, linux.MS_BIND)
        become()

    try:
        python = str(place / "python" / "bin" / Path(os.path.realpath(sys.executable)).name)
        return run_python(code, python=python, source=place / "source", preexec_fn=prepare, cwd="/", env={})
    finally:
        for name in ("python", "source"):
            (place / name).rmdir()
        place.rmdir()


def test_an_ordinary_user_has_all_three() -> None:
    if why := refusal("namespaces", as_root=False):
        pytest.skip(f"isolation 'namespaces' of a user without rights was tried: the kernel refuses it ({why})")
    skip_refused(*KINDS)
    root, user = os.geteuid() == 0, os.geteuid() or 12345
    said = run_as(ORDINARY, lambda: switch_user(user)) if root else run_python(ORDINARY)
    for kind, (user_namespace, uid, bomb, kill, environ, gaps) in said.items():
        assert uid == f"{user}\n" and kill == 1 and user_namespace == (kind == "namespaces")
        assert bomb in ("cpu", "wall", "processes", "memory")
        assert environ == (0 if kind == "seccomp" else 1)
        assert (kind == "seccomp") == any("/proc" in gap for gap in gaps)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user is not root without CAP_SYS_ADMIN")
def test_root_of_a_container_runs_programs_as_another_user() -> None:
    """Root without CAP_SYS_ADMIN, which may make user namespaces."""
    skip_refused("namespaces")
    if why := refusal("namespaces", as_root=False):
        pytest.skip(f"isolation 'namespaces' without rights was tried: the kernel refuses it ({why})")
    drop_from_bounding_set, sys_admin = 24, 21
    code = (
        "from lmworks.sandbox import Program, Sandbox\n"
        "with Sandbox(1, 'namespaces') as sandbox:\n"
        "    found = sandbox.isolation\n"
        '    result = sandbox.run(Program(\'import os\\nopen("x", "w").close()\\nprint(os.getuid())\'))\n'
        "print(json.dumps([found.own_user, found.user_namespace, int(result.text)]))"
    )
    own_user, user_namespace, uid = run_as(
        code, lambda: linux.checked(linux.LIBC.prctl(drop_from_bounding_set, sys_admin, 0, 0, 0), "prctl")
    )
    assert own_user and user_namespace and uid >= OWN_USERS


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
def test_nothing_remains_of_a_caller_that_is_killed(kind: str, tmp_path: Path) -> None:
    """Not its programs, which have daemons, nor their folders, nor the supervisor."""
    skip_refused(kind)
    program = (
        "import os, time\nfor _ in range(2): os.fork()\nif os.getpgrp() != os.getpid(): os.setsid()\ntime.sleep(600)"
    )
    code = (
        f"import os, sys, time; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from lmworks.sandbox import Sandbox, Program, Limits\n"
        f"sandbox = Sandbox(1, {kind!r})\n"
        "from lmworks.sandbox.worker import Worker\n"
        "worker = Worker(sandbox.isolation); sandbox.idle.put(worker)\n"
        "other = os.fork() or time.sleep(60)\n"  # keeps the caller's end of the socket open
        "print(worker.process.pid, other, flush=True)\n"
        f"sandbox.run(Program({program!r}), Limits(wall_seconds=500))"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)}
    )
    assert caller.stdout
    supervisor, other = map(int, caller.stdout.readline().split())
    assert wait_until(lambda: len(descendants(supervisor)) >= 5)
    started = descendants(supervisor)
    assert (list(tmp_path.iterdir()) == []) == (kind == "namespaces")  # whose folder is in memory
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in (supervisor, *started)))
    os.kill(other, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_programs_die_with_their_supervisor() -> None:
    skip_refused("namespaces")
    worker = Worker(choose("namespaces"))
    with ThreadPoolExecutor(1) as thread:
        program = Program("import os, time\nos.fork()\ntime.sleep(600)")
        answer = thread.submit(worker.run, program, Limits(wall_seconds=500))
        assert wait_until(lambda: len(descendants(worker.process.pid)) >= 4)
        started = descendants(worker.process.pid)
        worker.process.kill()
        with pytest.raises(SandboxError, match="was lost"):
            answer.result(30)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


def test_it_says_what_it_does_not_protect_from() -> None:
    """The strongest kind that the kernel allows; each stronger one with the reason why not."""
    allowed = [kind for kind in KINDS if not refusal(kind)]
    if not allowed:
        pytest.skip(f"every isolation was tried: the kernel refuses all ({'; '.join(map(refusal, KINDS))})")
    best = describe_isolation()
    assert best.kind == allowed[0]
    assert [line.split(":")[0] for line in best.refused] == list(KINDS[: KINDS.index(best.kind)])
    assert best.kind == "seccomp" or any("no other file" in line for line in best.protects)
    assert any("can be read" in gap for gap in describe_isolation("seccomp").gaps)
