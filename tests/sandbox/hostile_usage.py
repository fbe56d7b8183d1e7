"""Programs that want more than they may use, and programs with a bad end."""

from __future__ import annotations

from hostile import Hostile, stopped

USAGE = [
    stopped(
        "fork bomb",
        """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        "cpu", "wall", "processes", "memory", cpu_seconds=0.3, wall_seconds=2.0,
    ),
    Hostile(
        "threads",
        """
made = []
try:
    for _ in range(500):
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        made.append(thread)
except RuntimeError:
    pass
print("HARMED" if len(made) >= 500 else "refused", len(made))
sys.stdout.flush()
os._exit(0)
""",
        ends="", exit_code=None, limit=frozenset({None, "processes"}), limits={"processes": 16},
    ),
    Hostile(
        "zombies",
        """
for count in range(500):
    try:
        if not os.fork():
            os._exit(0)
    except OSError:
        break
print("HARMED" if count >= 499 else "refused", count)
""",
        ends="", exit_code=None, limit=frozenset({None, "processes"}), limits={"processes": 16},
    ),
    Hostile(
        "memory bomb",
        """
held = []
while True:
    held.append(bytearray(8 << 20))
""",
        ends="", exit_code=1, limits={"memory_bytes": 128 << 20},
    ),
    stopped(
        "memory in many children",
        """
for _ in range(8):
    if not os.fork():
        held = bytearray(48 << 20)
        time.sleep(60)
time.sleep(60)
""",
        "memory", memory_bytes=128 << 20,
    ),
    stopped(
        "shared memory in many children",
        """
import mmap
for _ in range(8):
    if not os.fork():
        held = mmap.mmap(-1, 48 << 20)
        held[:] = b"x" * (48 << 20)
        time.sleep(60)
time.sleep(60)
""",
        "memory", memory_bytes=160 << 20,
    ),
    Hostile("memory without a file name", "attempt('memfd', lambda: os.memfd_create('x'))\n"),
    stopped("endless output", "while True: print('x' * 1000)\n", "output", output_bytes=100_000),
    stopped("endless errors", "while True: os.write(2, b'x' * 1000)\n", "output", output_bytes=100_000),
    stopped("sleeps for ever", "time.sleep(1e9)\n", "wall", wall_seconds=0.4),
    stopped("busy loop", "while True: pass\n", "cpu", cpu_seconds=0.3),
    stopped(
        "busy loops in children that end",
        """
while True:
    if not os.fork():
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        os._exit(0)
    os.wait()
""",
        "cpu", cpu_seconds=0.3,
    ),
    stopped(
        "ignores signals",
        """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
""",
        "cpu", cpu_seconds=0.3,
    ),
    stopped("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)\n", "wall", wall_seconds=0.4),
    stopped("regex bomb", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n", "cpu", cpu_seconds=0.3),
    Hostile(
        "zip bomb",
        """
import zlib
packed = zlib.compress(bytes(4 << 20))
held = [zlib.decompress(packed) for _ in range(100)]
""",
        ends="", exit_code=1, limits={"memory_bytes": 96 << 20},
    ),
    Hostile(
        "deep recursion",
        """
sys.setrecursionlimit(10**9)
def down(_):
    return list(map(down, [0]))
down(0)
""",
        ends="", exit_code=None, limit=frozenset({None, "cpu"}),  # a signal or, in later versions, an exception
    ),
    Hostile("source that is nested too deeply", "x = " + "(" * 5000 + ")" * 5000, ends="", exit_code=1),
    Hostile("source with a null byte", "x = '\0'\n", ends="", exit_code=1),
    Hostile(
        "raises its limits",
        """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE"):
    which = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(which)
    def more():
        resource.setrlimit(which, (hard, 2 * hard))
    try:
        more()
    except (ValueError, OSError):
        print("refused", name)
    else:
        print("HARMED", name)
""",
    ),
    Hostile("reads standard input for ever", "while sys.stdin.read(1): pass\n"),
    Hostile("closes its output and goes on", "os.closerange(1, 3)\ntime.sleep(0.1)\nos._exit(7)\n", "", exit_code=7),
    Hostile("segmentation fault", "ctypes.string_at(0)\n", "", exit_code=None, signal=11),
    Hostile("abort", "os.abort()\n", "", exit_code=None, signal=6),
    Hostile("_exit in atexit", "import atexit\natexit.register(os._exit, 5)\n", "", exit_code=5),
    Hostile(
        "forges the answer",
        """
for fd in range(3, 256):
    for content in (b"\\0\\0\\0\\0", b"!error", b'{"exit_code": 0}'):
        try:
            os.write(fd, content)
            print("HARMED", fd)
        except OSError:
            pass
os._exit(9)
""",
        ends="", exit_code=9,
    ),
    Hostile("binary garbage", "os.write(1, bytes(range(256)) * 4)\nos.write(2, b'\\xff\\xfe')\n"),
    Hostile("terminal escape codes", "print('\\x1b]0;title\\x07\\x1b[2J\\x1b[31m')\n"),
]  # fmt: skip
