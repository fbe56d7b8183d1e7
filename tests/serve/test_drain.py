"""`lmworks serve` as a process: it comes up, answers the curl line of its help, and ends as it should."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from api_server import MODEL, Api, until

from lmworks.cli.main import app
from lmworks.serve.server import bind_socket
from lmworks.spec import LMWorksError

STREAM = {"model": "small", "prompt": [1, 2, 3], "stream": True, "ignore_eos": True, "n": 16, "max_tokens": 50}
STREAM["stream_options"] = {"include_usage": True}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on a free port, with a preset that takes seconds to write sixteen times 50 tokens."""
    command = [sys.executable, "-m", "lmworks", "serve", "small=cpu-3m", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next((line.split()[0] for line in process.stderr if line.startswith("http://")), "")
        until(lambda: answers(url) or process.poll() is not None, 90)
        assert process.poll() is None
        yield process, url
    finally:
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    """Asked every few milliseconds: without the certificates of all authorities, which take 40 ms to read."""
    try:
        return httpx.get(f"{url}/ready", trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


class Reading(threading.Thread):
    """A stream that is read in the background."""

    def __init__(self, url: str, key: str = "none needed") -> None:
        super().__init__(daemon=True)
        self.url, self.key, self.lines = url, key, list[str]()
        self.start()

    def run(self) -> None:
        where, headers = f"{self.url}/v1/completions", {"authorization": f"Bearer {self.key}"}
        options = {"json": STREAM, "headers": headers, "timeout": 60, "trust_env": False, "verify": False}
        with suppress(httpx.TransportError), httpx.stream("POST", where, **options) as answer:  # type: ignore[arg-type]
            for line in answer.iter_lines():
                self.lines += [line] if line else []


def test_sigterm_finishes_open_requests() -> None:
    with served() as (process, url):
        reading = Reading(url)
        until(lambda: reading.lines)
        process.send_signal(signal.SIGTERM)
        until(lambda: not answers(url))
        ready = httpx.get(f"{url}/ready", trust_env=False, verify=False)
        refused = httpx.post(f"{url}/v1/completions", json=STREAM, trust_env=False, verify=False)
        assert (ready.status_code, ready.json()["status"]) == (503, "draining"), "before nobody is there any more"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["connection"] == "close" and int(refused.headers["retry-after"]) >= 1
        until(lambda: not connects(url))
        reading.join(60)
        assert process.wait(30) == 0
        *_, usage, done = reading.lines
        assert done == "data: [DONE]" and '"completion_tokens":800' in usage, "finished, not cut"


def connects(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", trust_env=False, verify=False, timeout=5)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.slow
def test_drain_timeout_and_second_signal() -> None:
    with served("--drain-seconds", "0") as (process, url):
        reading = Reading(url)
        until(lambda: reading.lines)
        process.send_signal(signal.SIGTERM)
        reading.join(60)
        assert process.wait(30) == 0
        error: dict[str, Any] = json.loads(reading.lines[-1].removeprefix("data: "))
        assert "shutting down" in error["error"]["message"]
    with served("--drain-seconds", "60") as (process, url):
        reading = Reading(url)
        until(lambda: reading.lines)
        process.send_signal(signal.SIGTERM)
        until(lambda: not connects(url))
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(30) == 128 + signal.SIGTERM and time.monotonic() - began < 5


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_of_the_help_works(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    app(["serve", "--help"], standalone_mode=False)
    text = capsys.readouterr().out
    line = text[text.index("curl ") : text.index("}'") + 2].replace("\\\n", " ")
    line = line.replace("http://127.0.0.1:8000", api.url).replace('"demo"', f'"{MODEL}"')
    found = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to serve"),
        (["no/such/folder"], "no/such/folder"),
        (["tiny", "engine.contxt=5"], "contxt"),
        (["tiny", "--config", "missing.toml"], "missing.toml"),
        (["tiny", "a=tiny", "a=tiny"], "two models are called 'a'"),
        (["tiny", "--tls-cert", __file__], "--tls-key"),
        (["tiny", "--api-key-file", __file__], "easy to guess"),
        (["tiny", "--api-key-file", "missing"], "missing: cannot be read"),
        (["tiny", "--host", "203.0.113.1"], "203.0.113.1"),
        (
            ["tiny", "--chat-template", "missing.jinja"],
            r"template missing\.jinja: cannot be read \(No such file",
        ),
        (["tiny", "--chat-template", sys.executable], r"--chat-template .*: cannot be read"),
        (["tiny", "a=tiny", "--chat-template", __file__], "write NAME=FILE, with one of the models tiny, a"),
        (["tiny", "--chat-template", f"tny={__file__}"], "no model is called 'tny'; did you mean 'tiny'"),
    ],
)
def test_startup_errors_are_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(LMWorksError, match=said):
        app(["serve", "--port", "0", *arguments], standalone_mode=False)


def test_port_in_use_is_detected_early() -> None:
    """Two servers that load their models at the same time: the second is told so at once, not after minutes."""
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(LMWorksError, match="in use"):
        bind_socket("127.0.0.1", first.getsockname()[1])
