"""Programs that want other processes, the network or the kernel."""

from __future__ import annotations

from hostile import WITH_FILES, Hostile, stopped

REACH = [
    Hostile(
        "signals to our processes",
        """
for pid in (<canary>, <pytest>, <supervisor>, os.getppid()):
    if pid > 1:
        attempt(pid, lambda: os.kill(pid, 0))
        attempt(pid, lambda: raw(130 if ARM else 200, pid, 0))  # tkill
try:
    os.kill(<canary>, 0)
except OSError:  # else this would end the test, and all else
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(-1, number)
        except OSError:
            pass
""",
    ),
    Hostile(
        "signals by the owner of a pipe",
        """
import fcntl
read, _ = os.pipe()
attempt("F_SETOWN", lambda: fcntl.fcntl(read, fcntl.F_SETOWN, <canary>))
attempt("FIOSETOWN", lambda: fcntl.ioctl(read, 0x8901, (<canary>).to_bytes(4, sys.byteorder)))
""",
    ),
    Hostile(
        "changes limits and priority of our processes",
        """
import resource
attempt("prlimit", lambda: resource.prlimit(<canary>, resource.RLIMIT_NOFILE, (3, 3)))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, <canary>, 19))
attempt("affinity", lambda: os.sched_setaffinity(<canary>, {0}))
attempt("scheduler", lambda: os.sched_setscheduler(<canary>, os.SCHED_IDLE, os.sched_param(0)))
""",
    ),
    Hostile(
        "traces our processes",
        """
attach, seize = 16, 0x4206
for pid in (<canary>, <pytest>, os.getppid()):
    attempt("attach", lambda: raw(117 if ARM else 101, attach, pid, 0, 0))
    attempt("seize", lambda: raw(117 if ARM else 101, seize, pid, 0, 0))
    attempt("process_vm_readv", lambda: raw(270 if ARM else 310, pid, 0, 0, 0, 0, 0))
    attempt("memory", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
""",
    ),
    Hostile(
        "reads our environment",
        """
print(os.environ)
print(look("/proc/self/environ"))
import gc
print([one for one in gc.get_objects() if isinstance(one, dict) and "<token>" in one])
""",
    ),
    Hostile(
        "reads the environment of other processes",
        """
for pid in (<canary>, <pytest>, os.getppid(), *range(300)):
    for name in ("environ", "cmdline", "maps"):
        print(look(f"/proc/{pid}/{name}"))
""",
        kinds=WITH_FILES,
    ),
    Hostile(
        "leaves a subprocess behind",
        "subprocess.Popen(['sleep', '300.<token>'], stdin=0, start_new_session=True)\n",
        kinds=WITH_FILES,  # subprocess writes to /dev/null
    ),
    Hostile("leaves a daemon behind", "if not os.fork():\n    os.setsid()\n    time.sleep(300)\n"),
    Hostile(
        "leaves a daemon by double fork",
        """
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in range(1, 32):
        if number not in (9, 17, 19):
            signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 64)
    time.sleep(300)
os.wait()
""",
    ),
    stopped(
        "a child that outlives it and forks on",
        """
if not os.fork():
    os.setsid()
    while True:
        if os.fork():
            os._exit(0)
time.sleep(60)
""",
        "cpu", "wall", cpu_seconds=5.0, wall_seconds=0.6,
    ),
    Hostile("connects by TCP", "attempt('tcp', lambda: socket.create_connection(('127.0.0.1', <tcp>), 1))\n"),
    Hostile(
        "sends by UDP",
        """
attempt("udp", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"harm", ("127.0.0.1", <udp>)))
""",
    ),
    Hostile(
        "unix sockets",
        """
for address in ("\\0<token>", "<outside>/socket"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        def reach():
            with socket.socket(socket.AF_UNIX, kind) as one:
                one.connect(address)
        attempt("unix", reach)
attempt("pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"harm", "\\0<token>"))
one, two = socket.socketpair()
attempt("stream", lambda: one.connect("\\0<token>"))
""",
    ),
    Hostile(
        "listens, raw and netlink sockets",
        """
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
""",
    ),
    Hostile(
        "raw system calls",
        """
for name, x86, arm, *arguments in (
    ("unshare", 272, 97, 0x10000000), ("unshare mount", 272, 97, 0x20000), ("setns", 308, 268, 0, 0),
    ("mount", 165, 40, b"none", b"/tmp", b"tmpfs", 0, 0), ("umount", 166, 39, b"/proc", 2),
    ("keyctl", 250, 219, 0, -3, 1), ("add_key", 248, 217, b"user", b"x", b"y", 1, -3), ("bpf", 321, 280, 0, 0, 0),
    ("perf_event_open", 298, 241, 0, 0, -1, -1, 0), ("io_uring_setup", 425, 425, 8, 0), ("userfaultfd", 323, 282, 1),
    ("clone into a namespace", 56, 220, 0x10000000 | 17, 0, 0, 0, 0), ("clone3", 435, 435, 0, 0),
    ("fsopen", 430, 430, b"tmpfs", 0), ("open_tree", 428, 428, -100, b"/", 1), ("pidfd_getfd", 438, 438, 0, 0, 0),
    ("init_module", 175, 105, 0, 0, b""), ("syslog", 103, 116, 3, 0, 0), ("personality", 135, 92, 0x0040000),
    ("name_to_handle_at", 303, 264, -100, b"/", 0, 0, 0), ("shmget", 29, 194, 0, 4096, 0o1600),
    ("semget", 64, 190, 0, 1, 0o1600), ("msgget", 68, 186, 0, 0o1600), ("mq_open", 240, 180, b"x", 0o102, 0o600, 0),
    ("io_setup", 206, 0, 1, 0), ("memfd_secret", 447, 447, 0), ("a call of the future", 600, 600),
):
    attempt(name, lambda: raw(arm if ARM else x86, *arguments))
""",
    ),
    Hostile("32-bit numbers of x86-64 (x32)", "attempt('x32', lambda: raw(0x40000000 + 39))\n"),
    Hostile(
        "chroot",
        """
attempt("chroot", lambda: os.chroot("."))
attempt("pivot_root", lambda: raw(41 if ARM else 155, b".", b"."))
attempt("out of the root", lambda: print(open("/.." * 9 + "<secret_file>").read()))
""",
        kinds=WITH_FILES,
    ),
    Hostile(
        "other users",
        """
if os.getuid():
    attempt("setuid", lambda: os.setuid(0))
    attempt("setgid", lambda: os.setgid(0))
else:  # our own user is root: it has no rights of root
    attempt("a file of another user", lambda: os.open("<foreign_file>", os.O_RDONLY))
    attempt("setuid", lambda: os.setuid(1))
attempt("setgroups", lambda: os.setgroups([0]))
status = look("/proc/self/status") or b"CapEff:\\t0000000000000000"
print("refused capabilities" if b"CapEff:\\t0000000000000000" in status else "HARMED")
""",
    ),
    Hostile(
        "a setuid program",
        """
def gain():
    done = subprocess.run(["su", "-c", "id"], stdin=0, stdout=1, stderr=1, timeout=5)
    if done.returncode:
        raise OSError
attempt("su", gain)
""",
    ),
]  # fmt: skip
