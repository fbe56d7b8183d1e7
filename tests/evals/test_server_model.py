"""Requests to a server with OpenAI's API: their form, failures, and what is read from an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ADD, read_rows, write_rows

from lmworks.evals import load_suite, run_suite, server_model
from lmworks.evals.models import Completion, Likelihood, Prompt
from lmworks.evals.server_model import ServerModel
from lmworks.spec import LMWorksError

Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """A server that answers by a function of path and body."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, found = answer(self.path, body)
                sent = json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_model, "PAUSE_S", 0.0)


def completions(model: ServerModel, *prompts: Prompt) -> list[Completion]:
    found: dict[int, Completion] = {}
    model.generate(prompts, found.__setitem__)
    return [found[place] for place in range(len(prompts))]


PROMPT = Prompt("def f", seed=2**40, max_tokens=9, temperature=0.5, top_p=0.9, stop=list("abcdef"), suffix="end")


def test_completions_and_chats(serve: Callable[[Answer], str]) -> None:
    bodies = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        bodies.append((path, body))
        choice = {"text": "T", "message": {"content": "M"}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 4}}

    url = serve(answer)
    assert completions(ServerModel(url, "m"), PROMPT) == [Completion("T", 4, "stop")]
    assert completions(ServerModel(f"{url}/v1/", "m", chat=True), PROMPT) == [Completion("M", 4, "stop")]
    (path, body), (chat_path, chat) = bodies
    assert (path, chat_path) == ("/v1/completions", "/v1/chat/completions")
    assert body == {"model": "m", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 2**40 % 2**31,
                    "stop": list("abcd"), "prompt": "def f", "suffix": "end"}  # fmt: skip
    assert chat["messages"] == [{"role": "user", "content": "def f"}] and "prompt" not in chat


def test_stops_beyond_four_are_cut_here(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    """HumanEval has eight; `\\n```` is the last."""
    url = serve(lambda *_: (200, {"choices": [{"text": "    return a + b\n```\nand so on"}]}))
    suite = load_suite("humaneval", {"data": str(write_rows(tmp_path / "rows.jsonl", [ADD]))})
    found = run_suite(ServerModel(url, "m"), suite, tmp_path / "out")
    assert found["metrics"]["pass@1"]["value"] == 1.0
    assert read_rows(tmp_path / "out" / "samples.jsonl")[0]["text"] == "    return a + b"


def test_echoed_log_probabilities_behind_the_context(serve: Callable[[Answer], str]) -> None:
    """Tokens `The`, ` sky`, ` is`, ` blue` of which the last two end behind `The sky`."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["echo"] and body["max_tokens"] == 0 and body["prompt"] == "The sky is blue"
        logprobs = {
            "text_offset": [0, 3, 7, 10],
            "token_logprobs": [None, -9.0, -1.5, -0.5],
            "top_logprobs": [None, {"a": -0.1}, {" is": -1.5}, {" red": -0.4}],
        }
        return 200, {"choices": [{"text": body["prompt"], "logprobs": logprobs}]}

    found: dict[int, Likelihood] = {}
    model = ServerModel(serve(answer), "m")
    model.likelihoods([("The sky", " is blue"), ("The sky is", " blue"), ("The sky ", "is blue")], found.__setitem__)
    assert found == {0: Likelihood(-2.0, 2), 1: Likelihood(-0.5, 1), 2: Likelihood(-2.0, 2)}


def test_a_server_without_log_probabilities_is_named(serve: Callable[[Answer], str]) -> None:
    model = ServerModel(serve(lambda *_: (200, {"choices": [{"text": "x"}]})), "m")
    with pytest.raises(LMWorksError, match="gives no log-probabilities of a prompt"):
        model.likelihoods([("a", "b")], lambda *_: None)


def test_busy_servers_are_asked_again_and_refusals_kept(serve: Callable[[Answer], str]) -> None:
    tries = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        tries.append(body["prompt"])
        if body["prompt"] == "long":
            return 400, {"error": {"message": "too long"}}
        return (503, {}) if len(tries) < 3 else (200, {"choices": [{"text": "ok"}]})

    model = ServerModel(serve(answer), "m", concurrency=1)
    one, other = (Prompt(text, 0, 1, 0.0, 1.0) for text in ("short", "long"))
    assert completions(model, one, other) == [
        Completion("ok"), Completion("", finish_reason="error", error="too long"),
    ]  # fmt: skip
    assert tries == ["short"] * 3 + ["long"]


def test_what_came_before_a_failure_is_kept(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    rows = [{**ADD, "task_id": f"add{n}", "prompt": f"# {n}\n{ADD['prompt']}"} for n in range(4)]
    suite = load_suite("humaneval", {"data": str(write_rows(tmp_path / "rows.jsonl", rows))})
    good = (200, {"choices": [{"text": "    return a + b\n"}]})
    lost: set[str] = {"# 2"}
    asked = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(body["prompt"][:3])
        return (401, {"error": {"message": "no key"}}) if body["prompt"][:3] in lost else good

    model = ServerModel(serve(answer), "m", concurrency=1)
    with pytest.raises(LMWorksError, match="401 no key"):
        run_suite(model, suite, tmp_path / "out")
    kept = len(read_rows(tmp_path / "out" / "samples.jsonl"))
    assert kept == 2
    lost.clear()
    asked.clear()
    assert run_suite(model, suite, tmp_path / "out")["metrics"]["pass@1"]["value"] == 1.0
    assert asked == ["# 2", "# 3"]


def test_a_server_that_is_away_is_named() -> None:
    with pytest.raises(LMWorksError, match=r"127\.0\.0\.1:9/v1 does not answer"):
        completions(ServerModel("http://127.0.0.1:9", "m"), PROMPT)
