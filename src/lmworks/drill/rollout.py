"""A new version of the model beside the old one, and a gate that compares their answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ..fleet.up import ready
from ..spec import LMWorksError, dump_toml
from ..spec.files import write_whole
from .leftovers import environment
from .load import Question
from .local_fleet import ENGINE, MODEL, START_S, LocalFleet, descendants

CANARY = "next"  # pool of the new version
GATE = '''"""Asks the new version what the old one answers, and compares."""
import json, os, sys, urllib.request
known = json.load(open({known!r}))
wrong = 0
for body, expected in known:
    url = os.environ["LMWORKS_GATE_URL"].rstrip("/").removesuffix("/v1") + "/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {{"content-type": "application/json"}})
    with urllib.request.urlopen(request, timeout=60) as answer:
        wrong += json.load(answer)["choices"][0]["text"] != expected
print(f"{{wrong}} of {{len(known)}} answers differ from those of the version before")
sys.exit(wrong > 0)
'''


@dataclass
class Candidate:
    """A server of the new version."""

    fleet: LocalFleet
    model: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.fleet.port + 20}"

    def start(self) -> None:
        """Returns when it is ready."""
        port = self.url.rpartition(":")[2]
        words = [sys.executable, "-m", "lmworks", "serve", f"{MODEL}={self.model}", "--port", port, *ENGINE]
        with (self.fleet.folder / "logs" / "candidate.log").open("ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        end = time.monotonic() + START_S
        while not ready(self.url):
            if time.monotonic() > end or self.process.poll() is not None:
                raise LMWorksError(f"the new version did not start; see {self.fleet.folder}/logs/candidate.log")
            time.sleep(0.3)

    def engine(self) -> int:
        assert self.process is not None
        return next(
            pid for pid in descendants(self.process.pid)
            if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )  # fmt: skip

    def answer(self, question: Question) -> str:
        found = httpx.post(f"{self.url}/v1/completions", json=whole(question), timeout=60, trust_env=False)
        return str(found.json()["choices"][0]["text"])

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def begin_rollout(self, gate: Sequence[str] = (), **rule: Any) -> None:
        """The gateway's file gets its pool, and a rollout to it."""
        file = self.fleet.gateway_file
        config = tomllib.loads(file.read_text(encoding="utf-8"))
        config["pools"].append({"name": CANARY, "urls": [f"{self.url}/v1"]})
        shortened = {"step_seconds": 1.0, "min_requests": 1, "latency_ratio": 0.0, "steps": [0.1, 0.5]}
        config["rollouts"] = [{
            "model": MODEL, "stable": MODEL, "candidate": CANARY, "start": True, **shortened, **rule,
            **({"gate": list(gate)} if gate else {}),
        }]  # fmt: skip
        write_whole(file, dump_toml(config))

    def rollout(self) -> dict[str, Any]:
        """As the gateway keeps it beside its file; empty before its first decision."""
        with suppress(OSError, ValueError):
            states = json.loads(self.fleet.gateway_file.with_suffix(".rollouts.json").read_text(encoding="utf-8"))
            return dict(states[MODEL])
        return {}


def whole(question: Question) -> dict[str, Any]:
    """Its body, for an answer in one piece."""
    return {**question.body(MODEL), "stream": False, "stream_options": None}


def write_gate(folder: Path, questions: Sequence[Question], answers: Sequence[str]) -> list[str]:
    """A command that succeeds where a server gives these answers."""
    known = [(whole(question), answer) for question, answer in zip(questions, answers, strict=True)]
    (folder / "known.json").write_text(json.dumps(known), encoding="utf-8")
    (folder / "gate.py").write_text(GATE.format(known=str(folder / "known.json")), encoding="utf-8")
    return [sys.executable, str(folder / "gate.py")]
