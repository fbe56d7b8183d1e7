"""A server with a batch under way gets SIGKILL, twice: no line is lost, none has two results, none is computed anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import OpenAI

from lmworks.record.jsonl import read_lines
from serve_processes import start_server
from tiny import make_spec, train

LINES = 120


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_with_its_batch(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "model.context=512", "optim.steps=4"), tmp_path / "tiny")
    template, kept = tmp_path / "template.jinja", tmp_path / "kept"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    batch_id, seen, results = "", 0, []
    for number in range(3):
        server = start_server(tmp_path / "tiny", template, tmp_path / f"{number}.log", "--batch-dir", str(kept))
        try:
            server.wait_ready()
            client = OpenAI(base_url=server.url, api_key="none", max_retries=0)
            if not batch_id:
                body = {"model": "tiny", "max_tokens": 60, "temperature": 1, "ignore_eos": True}
                text = "\n".join(
                    json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions",
                                "body": {**body, "prompt": f"line {n}", "seed": n}})
                    for n in range(LINES)
                )  # fmt: skip
                file = client.files.create(file=text.encode(), purpose="batch")
                batch_id = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                ).id
            wanted = LINES if number == 2 else seen + LINES // 4
            while True:
                found = client.batches.retrieve(batch_id)
                assert found.request_counts is not None
                if found.status == "completed" or (number < 2 and found.request_counts.completed >= wanted):
                    break
            if number == 2:
                assert found.output_file_id is not None and found.error_file_id is None
                lines = [json.loads(one) for one in client.files.content(found.output_file_id).text.splitlines()]
            else:
                assert found.status == "in_progress", "killed in the middle"
        finally:
            server.kill()
        if number < 2:
            results = read_lines(kept / "batches" / batch_id / "results.jsonl")
            assert len({one["line"] for one in results}) == len(results) >= wanted
            seen = len(results)
    assert [one["custom_id"] for one in lines] == [f"{n}" for n in range(LINES)]
    assert all(one["shown"] in lines for one in results), "what had a result kept it"
