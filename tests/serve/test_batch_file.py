"""`lmworks batch`: the lines of a file by a server or by engines of the process; killed runs go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from api_server import MODEL, Api
from starlette.datastructures import Headers
from typer.testing import CliRunner

from chat_files import write_tokenizer
from lmworks import LLM, SamplingParams
from lmworks.cli.main import app
from lmworks.data.progress import silent
from lmworks.model import GPT
from lmworks.record.jsonl import read_lines
from lmworks.serve.batches.run_file import FileBatch, run_against
from lmworks.serve.batches.runner import Answer
from lmworks.serve.limits import Limits
from lmworks.spec import LMWorksError, ModelSpec, SpecError


def request(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"prompt": name, "max_tokens": 4, "temperature": 0} if url == "/v1/completions" else {}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": MODEL, **given, **body}}


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "work.jsonl"
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return file


def batch(file: Path, asked: object = None) -> FileBatch:
    return FileBatch(file, file.with_suffix(".out"), asked, None, Limits())


def test_a_server_runs_the_lines_of_several_endpoints(api: Api, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    file = write(
        tmp_path,
        request("b"),
        request("e", "/v1/embeddings", input="text"),
        "",
        request("c", "/v1/chat/completions", **chat),
        request("s", "/v1/score", text_1="a", text_2=["a", "b"]),
        request("wrong", max_tokens=-1),
        request("nobody's", model="other"),
    )
    told = CliRunner().invoke(app, ["batch", str(file), "--server", f"{api.url}/v1", "--in-flight", "3", "--json"])
    assert told.exit_code == 1, told.output  # two lines failed
    summary = json.loads(told.stdout)
    assert {name: summary[name] for name in ("lines", "completed", "failed", "resumed")} == {
        "lines": 6, "completed": 4, "failed": 2, "resumed": 0,
    }  # fmt: skip
    found = read_lines(tmp_path / "work.results.jsonl")
    assert [one["custom_id"] for one in found] == ["b", "e", "c", "s", "wrong", "nobody's"]
    assert [one["response"]["status_code"] for one in found] == [200, 200, 200, 200, 400, 404]
    bodies = [one["response"]["body"] for one in found]
    assert bodies[0]["choices"][0]["text"] == api.complete(prompt="b", max_tokens=4)["choices"][0]["text"]
    assert len(bodies[1]["data"][0]["embedding"]) == 32 and "max_tokens" in bodies[4]["error"]["message"]
    used = sum(one["usage"]["prompt_tokens"] for one in bodies[:4])
    assert summary["prompt_tokens"] == used and summary["completion_tokens"] >= 4
    assert not (tmp_path / "work.results.jsonl.partial").exists()
    again = CliRunner().invoke(app, ["batch", str(file), "--server", api.url])
    assert again.exit_code != 0 and "is there already" in str(again.exception)


def test_all_wrong_lines_are_named_before_any_is_run(tmp_path: Path) -> None:
    other = request("d", url="/v1/moderations")
    wrong = [request("a"), "{", request("a"), other, {"custom_id": "e"}, request("f", stream=True)]
    with pytest.raises(SpecError) as error:
        batch(write(tmp_path, *wrong))
    said = str(error.value).splitlines()
    assert [line.partition(":")[0].strip() for line in said[1:]] == ["line 3", "line 4", "line 5", "line 6"]
    for line, what in zip(said, ["line 2: the line is no JSON", "that of line 1", "url is", "method must be", "stream"],
                          strict=True):  # fmt: skip
        assert what in line
    assert [path.name for path in tmp_path.iterdir()] == ["work.jsonl"]


class Answering:
    """Answers so many requests, and then no more."""

    def __init__(self, most: int, first: Callable[[int], Answer | None] = lambda _: None) -> None:
        self.most, self.first, self.asked = most, first, list[str]()

    async def __call__(self, url: str, body: bytes, name: str) -> Answer:
        self.asked.append(name)
        if len(self.asked) > self.most:
            raise LMWorksError("the machine is on fire")
        await asyncio.sleep(0)
        early = self.first(len(self.asked))
        return early or Answer(200, Headers({}), json.dumps({"said": json.loads(body)["prompt"]}).encode())


def test_a_run_that_ended_early_asks_for_the_rest_alone(tmp_path: Path) -> None:
    file = write(tmp_path, *(request(str(number)) for number in range(10)))
    first, second = Answering(6), Answering(100)
    begun = batch(file)
    with pytest.raises(LMWorksError, match="on fire"):
        asyncio.run(begun.run(first, 1, silent))
    with pytest.raises(LMWorksError, match="another run"):
        batch(file)
    begun.close()
    with (tmp_path / "work.out.partial" / "results.jsonl").open("ab") as results:
        results.write(b'{"line": 7, "ok": tr')  # killed while it wrote
    again = batch(file)
    asyncio.run(again.run(second, 4, silent))
    summary = again.finish()
    assert first.asked == [f"batch_req_{number}" for number in range(1, 8)]
    assert sorted(second.asked) == sorted(f"batch_req_{number}" for number in range(7, 11))
    assert (summary.lines, summary.completed, summary.resumed) == (10, 10, 6)
    found = read_lines(tmp_path / "work.out")
    assert [one["response"]["body"]["said"] for one in found] == [str(number) for number in range(10)]


def test_results_of_another_file_or_model_are_not_mixed(tmp_path: Path) -> None:
    batch(write(tmp_path, request("1")), asked="one").close()
    with pytest.raises(SpecError, match="results of another file or model"):
        batch(tmp_path / "work.jsonl", asked="two")
    with pytest.raises(SpecError, match="results of another file or model"):
        batch(write(tmp_path, request("1", max_tokens=5)), asked="one")


def test_what_is_turned_away_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, broken = Answer(429, Headers({"retry-after": "0"}), b"{}"), Answer(500, Headers({}), b"{}")

    async def soon(_: float) -> None: ...

    work = batch(write(tmp_path, request("1")))
    monkeypatch.setattr("lmworks.serve.batches.run_file.asyncio.sleep", soon)
    post = Answering(100, lambda number: busy if number < 20 else broken)
    asyncio.run(work.run(post, 1, silent))
    assert len(post.asked) == 22  # a failure of the server is the result the third time
    assert work.finish().failed == 1


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.serve.batches.run_file.PATIENCE_S", 0.0)
    work = batch(write(tmp_path, request("1")))
    with pytest.raises(LMWorksError, match=r"ConnectError.*the same command goes on"):
        asyncio.run(run_against(work, "http://127.0.0.1:1", None, None, silent))
    work.close()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle, twice; the answers are those of the offline API."""
    torch.manual_seed(0)
    folder = write_tokenizer(tmp_path / "tiny")
    GPT(ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=512, context=512), seed=1).save_hf(folder)
    prompts = [f"text {number}" for number in range(60)]
    file = write(tmp_path, *(request(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts))
    results = tmp_path / "work.results.jsonl.partial" / "results.jsonl"
    command = [
        sys.executable,
        "-m",
        "lmworks",
        "batch",
        str(file),
        str(folder),
        "engine.dtype=fp32",
        "--in-flight",
        "4",
    ]
    seen: list[Any] = []
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline, wanted = time.monotonic() + 120, len(seen) + 12
        while not results.exists() or len(read_lines(results)) < wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before, seen = seen, read_lines(results)
        assert seen[: len(before)] == before and len({one["line"] for one in seen}) == len(seen) < 60
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout)["resumed"] == len(seen)
    found = read_lines(tmp_path / "work.results.jsonl")
    assert all(one["shown"] in found for one in seen)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = [result.text for result in LLM(folder, dtype="fp32", device="cpu").generate(prompts, params)]
    assert [one["response"]["body"]["choices"][0]["text"] for one in found] == expected
