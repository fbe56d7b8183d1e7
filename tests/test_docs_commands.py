"""Every command line of README.md and docs/ is executed, page by page and in order, as a reader would type it.

The whole of it takes minutes (`make test-slow`); commands that plan, and so need neither torch nor a run, are executed
in every `make test`. A line is run as printed. What is too long for a test gets shorter by options that are appended
(SHORTER), what needs a file, a server or a finished run finds it (BEFORE), and what cannot run on a machine without a
GPU and a network is listed with its reason (NOT_HERE).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.cli.main import main
from lmworks.spec import load_run
from tiny import write_adapter
from variations import with_slow

ROOT = Path(__file__).parent.parent
# Commands of the course's lessons run in a workspace: tests/learn/test_tracks.py.
LESSONS = ROOT / "docs" / "course"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != LESSONS)]

SMALL_RUN = "optim.steps=2 checkpoint.every=2 log.eval_every=0 log.eval_batches=1"
SMALL_BATCH = "data.seq=32 data.micro_batch=1"
SMALL_SHAPE = "model.vocab=512 model.layers=1 model.hidden=64 model.heads=2 model.kv_heads=2 model.ffn=64"

NOT_HERE = {
    r"^make |^source |^pip (install|wheel)": "sets up the environment that this test runs in",
    r"^torchrun --nnodes": "two machines: tests/parallel/test_two_nodes.py runs it between network namespaces",
    r"^lmworks bench (collectives --)?link": "needs root: tests/bench/test_shaped_link.py runs it",
    r"^lm_eval": "downloads its task: tests/serve/test_lm_eval.py runs one from disk",
    r"^python benchmarks/(train_gpu.py(?! --predict)|loss_gpu|serve_overhead)": "measures a GPU",
    r"^python benchmarks/mup_transfer.py(?! --tiny)": "measures a GPU",
    r"^lmworks sweep .*--slurm": "needs Slurm: tests/sweep/test_sweep_slurm.py runs it",
    r"^lmworks sweep .*--ray": "needs Ray: tests/sweep/test_sweep_ray.py runs it",
    r"^lmworks tune .*--storage postgresql": "needs PostgreSQL: tests/tune/test_storage.py runs it",
    r"\$(FLEET|GATEWAY|SERVER)": "needs a fleet: the drills run the commands of runbooks",
    r"^lmworks drill (?!list)": "starts a fleet, for minutes: tests/drill/test_drills.py has one",
    r"^lmworks fleet (up|status|down|restart|demo)": "stays in the foreground: tests/fleet/test_up.py runs it",
    r"^lmworks fleet fit": "needs a load test of minutes: tests/fleet/test_fit_server.py has one",
    r"^lmworks learn serve": "stays in the foreground: tests/learn/test_course_page.py runs it",
    r"^lmworks learn cheatsheet --measure": "takes minutes: tests/learn/test_cheat_sheet.py measures two ranks",
    r"^lmworks learn new": "writes into the source: tests/learn/test_author.py runs it in a copy",
    r"^lmworks profile attach": "needs a run under way: tests/train/test_attach.py has one",
    r"^lmworks bench kernels --record|model.attention=flash": "needs a GPU",
}
REFUSED = {r"^lmworks train configs/reference/": "GPU"}  # where there is none; a word of the message
SHORTER = {
    r"train configs/small.toml": SMALL_RUN,
    r"^python benchmarks/mup_transfer": "--steps 2 --minutes 0.2 --out mup_transfer.json",
    r"--dial depth=4": "data.global_batch=1 data.micro_batch=1",
    # a CPU without bf16 takes minutes for what is seconds elsewhere
    r"^lmworks train configs/tiny.toml precision.dtype=": SMALL_RUN,
    r"^lmworks train tiny data.path=stdlib:bytes": SMALL_RUN,
    r"^lmworks train gpt2-small": f"{SMALL_RUN} {SMALL_SHAPE} {SMALL_BATCH} data.global_batch=1",
    r"^lmworks bench train (gpt2-small|llama3-1b)": f"{SMALL_SHAPE} {SMALL_BATCH} parallel.compile=false --steps 1",
    r"^lmworks finetune": "optim.steps=1 log.eval_batches=1",
    r"^lmworks finetune.*( grpo| ppo|on_policy)": "align.prompts=2 align.samples=2 align.max_tokens=8",
    r"^lmworks bench offline": "--model tiny --quick",
    r"^lmworks bench kernels": "--model tiny --batch 1 --seq 16 --rounds 1",
    r"^lmworks profile engine": "--model tiny --requests 4",
    r"^lmworks bench collectives": "--sizes 1K:64K --seconds 0 --rounds 3",
    r"^lmworks bench serve": "--requests 4 --input 8:16 --output 4:8",
    r"^lmworks prove chaos (?!--list|.*--trial )": "--trials 1",
    r"^lmworks sweep configs": "optim.steps=6 log.eval_batches=1",
    r"--space warmup.toml": "optim.steps=30",  # not less than its longest warm-up
    r"^lmworks plan calibrate(?!.*--from-runs)": "--quick --minutes 0.1",
    r"^lmworks bench coordinate-check": f"{SMALL_BATCH} --steps 1 --seeds 1",
    r"^lmworks tune configs/tiny.toml": "optim.steps=27 data.seq=32 data.micro_batch=2 log.eval_batches=2",
    r"^lmworks bench overlap": "model.layers=2 data.seq=16 data.micro_batch=1 data.global_batch=4 --steps 2",
    r"^lmworks bench precision": "--steps 8",
    r"^lmworks bench precision(?! --only)": "--only fp16",
    r"^lmworks bench precision configs/small.toml": SMALL_BATCH,
}
STANDS_FOR = {  # addresses, folders and sizes of the page's own world
    "file:///backup/": "file://$PWD/backup/",
    "--url https://api.example.com": "--url http://127.0.0.1:8000",
    "--model some-model": "--model demo",
    "--shared-prefix 512x4": "--shared-prefix 8x4",
    "--only linear_cross_entropy --model llama3-8b": "--only linear_cross_entropy",
    "data.path=YOUR-TOKENS": "data.path=data/code",
    "--data DIR": "--data validation/published",
    "--tables DIR": "--tables validation",
}
NEEDS = {  # what a line finds there
    r"^lmworks gateway ten": r"""printf '[tenants]\nstore="sqlite:///g.db"\n[[tiers]]\nname="gold"' > gateway.toml""",
    r"^lmworks (?!train).*runs/tiny": "[ -d runs/tiny ] || lmworks train configs/tiny.toml --run-dir runs/tiny",
    r"--from-runs runs/mine": (  # several jobs
        "for seq in 32 64 128; do lmworks train configs/tiny.toml optim.steps=12 log.eval_batches=1 data.seq=$seq "
        "--run-dir runs/mine/$seq; done"
    ),
    r"measurements.csv": (
        "echo 'gpus,seq_len,global_batch,step_s,model,gpu,framework' > measurements.csv; for row in 8,8192,64,11 "
        "16,4096,128,5 64,8192,256,5.5; do echo $row,llama3-8b,h100,torchtitan >> measurements.csv; done"
    ),
    r"^lmworks sweep": "[ -f space.toml ] || echo 'optim.lr.values = [1e-3, 3e-3]' > space.toml",
    r"^lmworks bench serve": '[ -n "$server" ] || serve lmworks serve runs/demo',
    r"^lmworks serve --upstream": "lmworks serve demo=runs/demo --port 8001 & upstream=$!",
    r"^mkdir -p runs/copied": "cp runs/copied/spec.toml . && mv runs/copied runs/lost",
}
PRELUDE = r"""
set -eEuo pipefail
trap 'echo "FAILED: $BASH_COMMAND" >&2' ERR
trap 'stop_server; [ -z "$upstream" ] || kill "$upstream"' EXIT
server= upstream=
stop_server() { if [ -n "$server" ]; then kill "$server"; wait "$server"; server=; fi; }
serve() {  # in the background, until the next one or the end of the page
  stop_server; "$@" & server=$!
  until curl -ksf "http://127.0.0.1:8000/ready" || curl -ksf "https://127.0.0.1:8000/ready"; do
    kill -0 "$server"; sleep 0.2
  done
}
refused() {  # WORD COMMAND…: exit code 2, and a message that holds the word
  word=$1; shift; code=0; "$@" 2> refused.txt || code=$?
  [ "$code" = 2 ] && grep "$word" refused.txt
}
"""
STAGE = """
set -eu
lmworks train configs/small.toml --run-dir runs/demo optim.steps=5 log.eval_batches=1
lmworks checkpoint export runs/demo exported/demo
cp -r exported/demo exported/small
cp -r runs/demo runs/code
cp -r runs/demo runs/other
lmworks data prepare src/lmworks/spec --out data/code
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out cert.pem 2> /dev/null
"""


def logical_lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[list[str]]:
    found = re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [logical_lines(block) for block in found]


def without_comment(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line)


def adapted(line: str) -> Iterator[str]:
    """What the test's shell does for one line of a page."""
    if any(re.search(pattern, line) for pattern in NOT_HERE):
        return
    line = re.sub(r"\s+# .*$", "", line)
    for there, here in STANDS_FOR.items():
        line = line.replace(there, here)
    for pattern, words in SHORTER.items():
        if re.search(pattern, line):
            line = f"{line} {words}"
    yield from (command for pattern, command in NEEDS.items() if re.search(pattern, line))
    refusals = [word for pattern, word in REFUSED.items() if re.search(pattern, line)]
    if refusals:
        yield f"refused {refusals[0]} {line}"
    elif line.startswith("lmworks serve"):
        yield f"serve {line}"
    elif line.startswith("lmworks chat"):
        yield f"echo Hello | {line}"
    else:
        yield line


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a clone, and files, runs and adapters of his own."""
    folder = tmp_path_factory.mktemp("stage")
    for name in ("src", "benchmarks", "configs", "docs", "tests", "validation"):
        (folder / name).symlink_to(ROOT / name)
    shell(STAGE, folder)
    spec = load_run(folder / "runs/demo").model
    for seed, name in enumerate(("sql", "tests", "kind")):
        write_adapter(folder / "adapters" / name, spec, seed)
    (folder / "prompts.jsonl").write_text('"def f("\n{"prompt": "import "}\n')
    (folder / "text.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    for page, name in (("serving.md", "serve.toml"), ("spec.md", "my-gpus.toml")):
        (folder / name).write_text(last_toml(ROOT / "docs" / page).replace('"…"', f'"{"0" * 64}"'), encoding="utf-8")
    (folder / "chatml.jinja").write_text(code(ROOT / "docs/serving.md", "jinja")[0], encoding="utf-8")
    (folder / "runs.csv").write_text("model,gpu,gpus,seq,micro_batch,global_batch\nllama3-8b,H100,8,8192,1,8\n")
    return folder


def last_toml(page: Path) -> str:
    return code(page, "toml")[-1]


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=7200,  # a slow CPU that emulates bf16 and fp16
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_page_runs_as_printed(page: Path, stage: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(stage, folder, symlinks=True)
    commands = [command for block in blocks(page) for line in block for command in adapted(line)]
    shell("\n".join([PRELUDE, *commands]), folder)


QUICK = ("plan models", "plan hardware", "launch", "plan mesh", "plan memory", "plan serve", "plan reliability")
LINES = [line for page in PAGES for block in blocks(page) for line in block]


QUICK_LINES = [line for line in LINES if line.startswith(tuple(f"lmworks {name}" for name in QUICK))]


# To measure the machine takes 20 s; tests/cli/test_plan_cli.py has it in less.
@pytest.mark.parametrize("line", with_slow(QUICK_LINES, [line for line in QUICK_LINES if "--probe" in line]))
def test_quick_command_runs_as_printed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    if " --out " in line:
        assert Path(line.split(" --out ")[1].split()[0]).stat().st_size > 1000


def test_every_line_that_is_not_run_is_there() -> None:
    """A pattern that no line meets any more is an exception without a rule."""
    tables = {"NOT_HERE": NOT_HERE, "REFUSED": REFUSED, "SHORTER": SHORTER, "NEEDS": NEEDS}
    unused = {
        name: [p for p in table if not any(re.search(p, line) for line in LINES)] for name, table in tables.items()
    }
    unused["STANDS_FOR"] = [there for there in STANDS_FOR if not any(there in line for line in LINES)]
    assert not any(unused.values()), unused
