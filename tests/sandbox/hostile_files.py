"""Programs that want files: more than they may have, or ours."""

from __future__ import annotations

from hostile import WITH_FILES, Hostile

FILES = [
    Hostile(
        "huge file",
        """
def fill():
    with open("huge", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
attempt("huge file", fill)
""",
        limit=frozenset({None, "disk"}), limits={"disk_bytes": 8 << 20},
    ),
    Hostile(
        "huge files, many",
        """
def fill():
    for count in range(64):
        with open(f"huge{count}", "wb") as file:
            file.write(bytes(4 << 20))
        time.sleep(0.02)
attempt("huge files", fill)
""",
        ends="", exit_code=None, limit=frozenset({None, "disk"}), limits={"disk_bytes": 8 << 20},
    ),
    Hostile(
        "sparse file",
        """
def grow():
    with open("sparse", "wb") as file:
        os.ftruncate(file.fileno(), 1 << 40)
attempt("sparse file", grow)
""",
    ),
    Hostile(
        "millions of small files",
        """
def fill():
    for count in range(10**6):
        open(f"{count}", "w").close()
attempt("small files", fill)
""",
        ends="", exit_code=None, limit=frozenset({None, "disk"}), limits={"disk_files": 100},
    ),
    Hostile(
        "folders without end",
        """
for count in range(500):
    try:
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    except OSError:
        break
""",
        ends="", exit_code=None, limit=frozenset({None, "disk"}),
    ),
    Hostile("closed folder", "os.mkdir('closed', 0)\n", kinds=WITH_FILES),
    Hostile(
        "many open files",
        """
held = []
attempt("open files", lambda: [held.append(os.open("/dev/null", os.O_RDONLY)) for _ in range(5000)])
del held[:], held
os.closerange(3, 5000)
""",
    ),
    Hostile(
        "writes elsewhere",
        """
for path in ("<outside>/new", "<secret_file>", "<home>/<token>", "<repo>/<token>", "/etc/<token>", "/var/tmp/<token>",
             "/usr/<token>", "<prefix>/<token>", "../<token>", "/<token>"):
    attempt(path, lambda: write(path))
    attempt(path, lambda: os.mkdir(path))
try:
    write("/dev/shm/<token>")
except OSError:
    pass
""",
    ),
    Hostile(
        "removes and changes files elsewhere",
        """
for path in ("<secret_file>", "<foreign_file>", "<outside>"):
    for call in (os.unlink, os.rmdir, lambda path: os.rename(path, path + "x"), lambda path: os.chmod(path, 0o777),
                 lambda path: os.utime(path, (0, 0)), lambda path: os.truncate(path, 0),
                 lambda path: os.setxattr(path, "user.x", b"x"), lambda path: os.chown(path, 1, 1)):
        attempt(path, lambda: call(path))
""",
    ),
    Hostile(
        "truncates a file that it opens to read",
        "attempt('truncate', lambda: os.open('<secret_file>', os.O_RDONLY | os.O_TRUNC))\n",
    ),
    Hostile(
        "symbolic link out of the folder",
        """
try:
    os.symlink("<outside>", "link")
    os.symlink("<secret_file>", "file")
except OSError:
    pass
attempt("through a folder", lambda: write("link/new"))
attempt("through a file", lambda: write("file"))
attempt("read", lambda: open("file").read())
""",
    ),
    Hostile("hard link to a file of ours", "attempt('link', lambda: os.link('<secret_file>', 'mine'))\n"),
    Hostile(
        "reads secrets",
        """
for path in ("<secret_file>", "/etc/shadow", "<home>/.ssh/id_ed25519", "<home>/.bashrc", "<repo>/pyproject.toml"):
    attempt(path, lambda: print(open(path).read()))
attempt("repository", lambda: print(os.listdir("<repo>")))
attempt("outside", lambda: print(os.listdir("<outside>")))
""",
        kinds=WITH_FILES,
    ),
    Hostile(
        "deletes its folder",
        """
import shutil
here = os.getcwd()
if here == "/sandbox" or "lmworks-sandbox-" in here:
    shutil.rmtree(here, ignore_errors=True)
for call in (os.rmdir, lambda path: os.rename(path, path + "x")):
    try:
        call(here)
    except OSError:
        pass
""",
    ),
    Hostile(
        "kernel and devices",
        """
for path in ("/dev/mem", "/dev/kmem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/proc/sysrq-trigger",
             "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/sys/power/state",
             "/sys/fs/cgroup/cgroup.procs", "/proc/1/mem", "/proc/1/oom_score_adj"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
attempt("mknod", lambda: os.mknod("device", 0o20600, os.makedev(1, 1)))
""",
    ),
    Hostile(
        "imports modules of our working directory",
        """
for name in ("lmworks", "hostile", "conftest"):
    try:
        __import__(name)
        print("HARMED", name)
    except ImportError:
        print("refused", name)
""",
    ),
]  # fmt: skip
