"""No secret in what others can read: lists of processes, logs, errors, answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

from lmworks.cli.main import app
from lmworks.serve.keys import read_secrets
from lmworks.spec import SpecError

SECRETS = {name: f"secret-{name}-2f9a7c" for name in ("stdin", "variable", "upstream", "pool", "register", "wrong")}


def command_lines(process: int) -> list[str]:
    """Of a process and all below it, as `ps` shows them."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {process}
    for _ in range(4):  # generations
        found |= {one for one, parent in parents.items() if parent in found}
    return [lines[one] for one in found if one in lines]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until_up(url: str) -> None:
    for _ in range(600):
        with suppress(httpx.TransportError):
            httpx.get(f"{url}/health", trust_env=False)
            return
        time.sleep(0.1)
    raise TimeoutError(url)


def start(words: list[str], log: Path, variables: dict[str, str], given: str = "") -> subprocess.Popen[str]:
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmworks", *words],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            env={**os.environ, **variables},
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(given)
    process.stdin.close()
    return process


def test_secrets_are_in_no_command_line_log_or_answer(tmp_path: Path) -> None:
    """A server with two API processes and a gateway, each with every kind of secret that it can have."""
    server, gateway = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    file, logs = tmp_path / "g.toml", [tmp_path / "server.log", tmp_path / "gateway.log"]
    file.write_text(
        f'[listen]\nport = {gateway[17:]}\n[health]\ninterval = 0.2\n[[pools]]\nname = "p"\nurls = ["{server}/v1"]\n'
        'key_env = "POOL"\nregister = true\nregister_env = "REGISTER"\n'
    )
    serve = ["serve", "--upstream", "http://127.0.0.1:9/v1", "--port", server[17:], "--api-key-file", "-"]
    variables = {"LMWORKS_API_KEY": SECRETS["variable"], "LMWORKS_UPSTREAM_KEY": SECRETS["upstream"]}
    processes = [
        start([*serve, "--api-processes", "2"], logs[0], variables, SECRETS["stdin"] + "\n"),
        start(["gateway", str(file)], logs[1], {"POOL": SECRETS["pool"], "REGISTER": SECRETS["register"]}),
    ]
    seen: list[str] = []
    try:
        with httpx.Client(trust_env=False) as http:
            for url in (server, gateway):
                until_up(url)
                for key in ("stdin", "variable", "wrong", "register"):
                    headers = {"authorization": f"Bearer {SECRETS[key]}", "content-type": "application/json"}
                    for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/gateway/servers", "/nowhere"):
                        answer = http.get(url + path, headers=headers)
                        assert path != "/v1/models" or url != server or key != "stdin" or answer.status_code == 200
                        seen += [answer.text, str(answer.headers)]
                    body = b'{"model": "x", "prompt": "a", "url": "file:///etc/passwd"}'
                    for path in ("/v1/completions", "/gateway/servers"):
                        seen.append(http.post(url + path, content=body, headers=headers).text)
        groups = [command_lines(process.pid) for process in processes]
        assert len(groups[0]) >= 3 and len(groups[1]) >= 1, groups
        seen += [line for group in groups for line in group]
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
    seen += [log.read_text() for log in logs]
    assert '"message": "request"' in seen[-2]
    found = {name for name, secret in SECRETS.items() if any(secret in one for one in seen)}
    assert not found


def test_no_option_of_any_command_takes_a_secret() -> None:
    """By their names: what holds a secret is a file's name or a variable's."""
    named = re.compile(r"(^|-)(key|token|secret|password)s?$")
    found = set()

    def walk(command: object, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}")
        for parameter in getattr(command, "params", []):
            for option in parameter.opts:
                if named.search(option) and not option.endswith("-tokens"):
                    found.add(f"{path} {option}")

    walk(get_command(app), "lmworks")
    assert found <= {"lmworks serve --tls-key"}, found  # a file


@pytest.mark.parametrize(("text", "says"), [("", "no key"), ("\n \n", "no key"), (None, "cannot be read")])
def test_files_of_keys(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SpecError, match=says):
        read_secrets(file)
    file.write_text("first-key\n\n  second-key \n")
    assert read_secrets(file) == ["first-key", "second-key"]
