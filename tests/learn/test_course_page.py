"""The course's page, over real sockets: what it shows and records, whom it refuses, and that it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.learn.checking.verdict import FAILED, PASSED, Verdict
from lmworks.learn.exercise import exercises
from lmworks.learn.goals import readings
from lmworks.learn.interview import questions
from lmworks.learn.tracks import lesson_names
from lmworks.learn.web import server as page_server
from lmworks.learn.web.pages import Pages
from lmworks.learn.web.server import PageServer
from lmworks.learn.what_if import Answer, Setting, answer, around
from lmworks.learn.workspace import Workspace

WRONG = Verdict("rmsnorm", FAILED, case="<b>one</b> vector", expected="1", got="2", output="<script>alert(1)</script>")


class Worker:
    """In place of the process that checks."""

    def __init__(self, folder: Path) -> None:
        self.verdict, self.asked = WRONG, []

    def ask(self, kind: str, exercise: str) -> dict[str, Any]:
        self.asked.append((kind, exercise))
        return self.verdict.as_json() if kind == "check" else {"lines": ["loss <1>"]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(page_server, "CheckWorker", Worker)
    found = PageServer(Workspace.create(tmp_path / "course"))
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def ask(server: PageServer, path: str, form: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
    """`path` after the token."""
    return raw(server.port, f"/{server.token}/{path}", form, **headers)[:2]


def raw(port: int, path: str, form: dict[str, str] | None = None, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    method, body = ("GET", None) if form is None else ("POST", urlencode(form))
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answered = connection.getresponse()
    text = answered.read().decode()
    connection.close()
    return answered.status, text, dict(answered.getheaders())


def progress(server: PageServer) -> dict[str, Any]:
    file = server.pages.workspace.folder / ".learn/progress.json"
    return json.loads(file.read_text()) if file.exists() else {"exercises": {}, "answers": {}}


# --- pages -----------------------------------------------------------------------------------------------


def test_pages_lead_to_one_another_and_fetch_nothing(server: PageServer) -> None:
    ahead, seen = [f"/{server.token}/"], set()
    while ahead:
        path = ahead.pop()
        seen.add(path)
        status, text, headers = raw(server.port, path)
        assert status == 200, path
        assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "same-origin"
        assert not re.search(r"\bsrc=|@import|url\((?!#)", text)
        links = set(map(unescape, re.findall(r'href="([^"]+)"', text)))
        own = {one for one in links if one.startswith(f"/{server.token}/")}
        assert all(one.startswith("https://") for one in links - own)
        ahead += sorted(own - seen - set(ahead))
    names = [f"lesson/{name}" for name in exercises()] + [f"reading/{name}" for name in readings()]
    names += [f"interview/{name}" for name in questions()]
    names += [f"tracks/{name}" for name in lesson_names()]
    names += ["", "plan", "tracks", "interview", "what-if", "cheatsheet"]
    assert {f"/{server.token}/{name}" for name in names} == seen


def test_where_you_are(server: PageServer) -> None:
    learner = server.pages.workspace
    _, text = ask(server, "")
    assert f"0 of {len(exercises())}" in text and f"{learner.folder}/src/models/gpt.py:" in text
    server.worker.verdict = Verdict("rmsnorm", PASSED)
    learner.apply_solution(exercises()["rmsnorm"])
    ask(server, "check/rmsnorm", {})
    _, text = ask(server, "")
    assert f"1 of {len(exercises())}" in text and '<span class="state">1 check · passed</span>' in text
    assert re.search(r"<h2>Next</h2>.*?2\. rotate_half", text)
    (learner.folder / "src/models/gpt.py").unlink()
    assert "gpt.py is gone; `lmworks learn reset src/models/gpt.py` writes it anew" in ask(server, "")[1]
    assert ask(server, "lesson/rmsnorm")[0] == 200


def test_a_lesson(server: PageServer) -> None:
    _, text = ask(server, "lesson/rmsnorm")
    shown = unescape(re.sub(r"<[^>]+>", "", text))
    assert exercises()["rmsnorm"].task in shown and 'return unfinished("rmsnorm", self, x)' in shown
    assert not [one for one in exercises()["rmsnorm"].hints if one.split("`")[0] in shown]


def test_hints_one_by_one_are_recorded(server: PageServer) -> None:
    for number in (1, 2, 3, 3):
        status, text = ask(server, "hint/rmsnorm", {})
        assert status == 200 and text.count("<li>") == number
        assert progress(server)["exercises"]["rmsnorm"]["hints"] == number
    assert "lmworks learn solution rmsnorm" in text and "<form" not in text
    assert "Three steps: square" in ask(server, "lesson/rmsnorm")[1]


def test_checks_are_recorded_and_what_code_prints_is_text(server: PageServer) -> None:
    status, text = ask(server, "check/rmsnorm", {})
    assert status == 200 and "&lt;script&gt;alert(1)" in text and "&lt;b&gt;one" in text
    assert "<script" not in text and "<b>" not in text and "data-now" not in text
    assert progress(server)["exercises"]["rmsnorm"]["tries"] == 1
    server.worker.verdict = Verdict("rmsnorm", PASSED)
    status, text = ask(server, "check/rmsnorm", {})
    assert "✓ 1. RMSNorm.forward passes" in text and f'action="/{server.token}/effect/rmsnorm"' in text
    assert progress(server)["exercises"]["rmsnorm"]["passed"]
    assert "loss &lt;1&gt;" in ask(server, "effect/rmsnorm", {})[1]
    assert server.worker.asked == [("check", "rmsnorm")] * 2 + [("effect", "rmsnorm")]


def test_pages_are_answered_during_a_check(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def waits(kind: str, exercise: str) -> dict[str, Any]:
        assert goes_on.wait(30)
        return WRONG.as_json()

    monkeypatch.setattr(server.worker, "ask", waits)
    answers: list[tuple[int, str]] = []
    checking = threading.Thread(target=lambda: answers.append(ask(server, "check/rmsnorm", {})))
    checking.start()
    assert ask(server, "")[0] == 200 and ask(server, "hint/rmsnorm", {})[0] == 200
    assert not answers
    goes_on.set()
    checking.join(30)
    assert answers[0][0] == 200
    assert progress(server)["exercises"]["rmsnorm"] == {"tries": 1, "hints": 1, "passed": "", "gave_up": False}


def test_quizzes_of_exercises_and_readings(server: PageServer) -> None:
    _, text = ask(server, "quiz/rmsnorm", {"0": "1", "1": "2"})
    assert text.count("Right.") == 1 and "No: the mean." in text
    assert progress(server)["answers"] == {"rmsnorm/0": True, "rmsnorm/1": False}
    for form in ({"0": "1"}, {"0": "1", "1": "9"}, {"0": "1", "1": "²"}):
        assert ask(server, "quiz/rmsnorm", form) == (409, '<p class="bad">an answer to each question, please</p>')
    _, text = ask(server, "plan")
    assert f'<a href="/{server.token}/reading/ddp_tutorial"><code>lmworks learn quiz ddp_tutorial</code></a>' in text
    assert f'<a href="/{server.token}/lesson/optimizer"><code>lmworks learn check optimizer</code></a>' in text
    reading = readings()["ddp_tutorial"]
    ask(server, "quiz/ddp_tutorial", {str(at): str(one.answer) for at, one in enumerate(reading.quiz)})
    _, text = ask(server, "plan")
    assert text.count(f"{len(reading.quiz)} of {len(reading.quiz)} answered right") >= 1
    assert '<span class="good">✓</span>' in text and "learn quiz ddp_tutorial</code>" not in text


def test_a_broken_progress_file_is_said(server: PageServer) -> None:
    (server.pages.workspace.folder / ".learn/progress.json").write_text("{")
    status, text = ask(server, "")
    assert status == 409 and "is not a progress file" in text


# --- whom it refuses -------------------------------------------------------------------------------------


def test_others_are_refused(server: PageServer) -> None:
    port, token, good = server.port, server.token, f"127.0.0.1:{server.port}"
    for path in ("/", "/x/", f"/{token[:-1]}/", f"/{token}x/", f"/%20{token}/", "/%C3%A9/"):
        assert raw(port, path)[0] == 403, path
        assert raw(port, f"{path}hint/rmsnorm", {})[0] == 403
    assert len(token) >= 20
    for host in ("example.org", f"example.org:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"localhost.evil:{port}"):
        assert ask(server, "", Host=host)[0] == 403, host
        assert ask(server, "hint/rmsnorm", {}, Host=host)[0] == 403
    assert ask(server, "", Host=f"localhost:{port}")[0] == 200
    for origin in ("http://example.org", "null", f"https://{good}", f"http://localhost:{port}"):
        assert ask(server, "hint/rmsnorm", {}, Origin=origin)[0] == 403, origin
    assert progress(server)["exercises"] == {}
    assert ask(server, "hint/rmsnorm", {}, Origin=f"http://{good}")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "lesson/../../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "lesson/%2e%2e", "lesson/",
             "lesson//etc/passwd", "etc/passwd", "lesson/rmsnorm/x", "check/rmsnorm", "what-if/../plan"]
)  # fmt: skip
def test_no_other_file_is_reached(server: PageServer, path: str) -> None:
    status, text = ask(server, path)
    assert status == 404 and "root:" not in text


def test_forms_have_a_size(server: PageServer) -> None:
    assert ask(server, "quiz/rmsnorm", {"0": "1" * page_server.BODY_BYTES})[0] == 413
    assert ask(server, "hint/rmsnorm", {}, Content_Length="-1")[0] == 413
    assert ask(server, "hint/nothing", {})[0] == 404
    assert progress(server)["exercises"] == {}


# --- what happens if -------------------------------------------------------------------------------------


def test_what_if_says_what_the_planner_says(server: PageServer) -> None:
    setting = Setting.of({"model": "llama3-8b", "zero": "3", "ranks": "16", "recompute": "full"})
    found = answer(setting)
    result = CliRunner().invoke(app, [*setting.command.split()[1:], "--json"])
    planned = json.loads(result.output)
    assert found.reserved == planned["reserved"] and (found.fit == "fits") == planned["fits"]
    assert found.weights == planned["parameters"] + planned["master"] and found.optimizer == planned["optimizer"]
    _, text = ask(server, "what-if/tables?model=llama3-8b&zero=3&ranks=16&recompute=full")
    assert text.count("<tr class=chosen><td>3</td>") == 1 and setting.command in unescape(text)
    status, text = ask(server, "what-if/tables?zero=7")
    assert status == 409 and "no choice here" in unescape(text)
    assert ask(server, "what-if?tp=4")[0] == 200


def known(found: dict[str, Answer | str]) -> dict[str, Answer]:
    return {value: one for value, one in found.items() if isinstance(one, Answer)}


def test_stages_shard_what_they_are_known_for() -> None:
    params, ranks = 124_439_808, 8  # of GPT-2: 4 bytes each in fp32, twice that for Adam
    by_stage = known(around(Setting(model="gpt2-small", ranks=str(ranks)), "zero"))
    assert by_stage["0"].weights == 4 * params and by_stage["0"].optimizer == pytest.approx(8 * params, rel=1e-4)
    kinds = ("optimizer", "gradients", "weights")
    shares = {
        stage: [getattr(one, kind) / getattr(by_stage["0"], kind) * ranks for kind in kinds]
        for stage, one in by_stage.items()
    }
    assert shares["1"] == pytest.approx([1, 8, 8], rel=0.02)
    assert shares["2"] == pytest.approx([1, 1, 8], rel=0.02)
    assert shares["3"] == pytest.approx([1, 1, 1], rel=0.02)


def test_more_micro_batches_fill_a_pipeline() -> None:
    """(p − 1)/(m + p − 1) of a step with equal stages is idle."""
    found = around(Setting(pp="4", ranks="4"), "micro_batches")
    assert isinstance(found["1"], str) and "micro-batches" in found["1"]
    idle = {int(count): one.idle_s / one.step_s for count, one in known(found).items()}
    assert list(idle) == [4, 8, 16, 32, 64]
    for count, share in idle.items():
        assert share == pytest.approx(3 / (count + 3), rel=0.15), count


# --- the real process ------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    Workspace.create(tmp_path / "course")
    (tmp_path / "tmp").mkdir()
    found = subprocess.Popen(
        [sys.executable, "-m", "lmworks", "learn", "serve"], cwd=tmp_path / "course", stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    yield found
    found.kill()
    found.wait()


def address(process: subprocess.Popen[str]) -> tuple[int, str]:
    assert process.stdout
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]+/)\n", process.stdout.readline())
    assert found
    return int(found[1]), found[2]


def workers(process: subprocess.Popen[str]) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def until(true: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_check_in_the_real_process(process: subprocess.Popen[str], tmp_path: Path) -> None:
    port, root = address(process)
    learner = Workspace(tmp_path / "course")
    assert "is not written yet" in raw(port, f"{root}check/rotate_half", {})[1]
    learner.rewrite(exercises()["rotate_half"], lambda _: "a, b = x.chunk(2, -1)\nreturn torch.cat((b, -a), -1)\n")
    text = unescape(raw(port, f"{root}check/rotate_half", {})[1])
    assert "expected  float32 (4,): [-3, -4, 1, 2]" in text and "Perhaps: The wrong half is negated" in text
    learner.apply_solution(exercises()["rotate_half"])
    began = time.monotonic()
    assert "✓ 2. rotate_half passes" in raw(port, f"{root}check/rotate_half", {})[1]
    assert time.monotonic() - began < 2
    (worker,) = workers(process)
    os.kill(worker, signal.SIGKILL)
    until(lambda: workers(process) not in ([worker], []))
    assert "✓ 2. rotate_half passes" in raw(port, f"{root}check/rotate_half", {})[1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_it_ends_within_a_check_and_leaves_nothing(
    process: subprocess.Popen[str], tmp_path: Path, number: int, code: int
) -> None:
    port, root = address(process)
    endless = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass\n"
    Workspace(tmp_path / "course").rewrite(exercises()["rotate_half"], lambda _: endless)
    asking = threading.Thread(target=lambda: quietly(port, f"{root}check/rotate_half"), daemon=True)
    asking.start()
    until(lambda: any(path.read_text() for path in (tmp_path / "tmp").glob("lmworks-learn-*/workspace/output.txt")))
    (printed,) = (tmp_path / "tmp").glob("lmworks-learn-*/workspace/output.txt")
    below = [int(printed.read_text()), *workers(process)]
    process.send_signal(number)
    assert process.wait(20) == code
    until(lambda: not any(os.path.exists(f"/proc/{one}") for one in below))
    until(lambda: not list((tmp_path / "tmp").glob("lmworks-learn-*/workspace")))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def quietly(port: int, path: str) -> None:
    with suppress(OSError, http.client.HTTPException):
        raw(port, path, {})


@pytest.mark.slow
def test_a_port_that_is_taken(process: subprocess.Popen[str], tmp_path: Path) -> None:
    port, _ = address(process)
    words = [sys.executable, "-m", "lmworks", "learn", "serve", "--port", str(port)]
    done = subprocess.run(words, cwd=tmp_path / "course", capture_output=True, text=True)
    assert done.returncode == 2 and f"--port {port}: Address already in use; without --port" in done.stderr


def test_pages_need_no_server(tmp_path: Path) -> None:
    """They are text of a workspace; PyTorch is not among what they import."""
    learner = Workspace.create(tmp_path / "course")
    assert "1. RMSNorm.forward" in Pages(learner, "/x").home()
    code = "import sys, lmworks.learn.web.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
