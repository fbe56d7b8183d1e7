"""Files and batches: the real `openai` client, two tenants, wrong lines, cancelling, expiry, and servers that stop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from api_server import MODEL, Api, House, until
from openai import OpenAI
from openai.types import Batch

from lmworks.record.jsonl import read_lines
from lmworks.serve.batches import batch as batch_module
from lmworks.serve.batches.service import BatchService
from lmworks.spec import LMWorksError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ALICE, BOB = "alice's secret", "bob's own secret"
LIMITS = "[limits]\nbatch_file_bytes = 20000\nbatch_lines = 40\nbatch_files = 60\nbody_bytes = 4096\ndepth = 16\n"


def keys_file(path: Path, extra: str = "") -> Path:
    keys = "".join(f'[[keys]]\nname = "{name}"\nsecret = "{key}"\n' for name, key in (("alice", ALICE), ("bob", BOB)))
    path.write_text(LIMITS + extra + keys)
    return path


@pytest.fixture(scope="module")
def server(house: House, tmp_path_factory: pytest.TempPathFactory) -> Api:
    folder = tmp_path_factory.mktemp("batches")
    return house.open(keys_file(folder / "serve.toml"), batch_dir=folder / "kept")


@pytest.fixture(scope="module")
def alice(server: Api) -> OpenAI:
    return server.client(ALICE)


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, "prompt": "Hello"} | body
    if url == EMBEDDINGS:
        body = {name: value for name, value in body.items() if name in ("model", "input")}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: OpenAI, lines: Sequence[Any]) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("work.jsonl", text.encode()), purpose="batch").id


def create(client: OpenAI, lines: Sequence[Any], url: Any = COMPLETIONS, **more: Any) -> Batch:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=url, completion_window="24h", **more)


def wait(client: OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def ended() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    until(ended, 30)
    return found[0]


def records(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_answers_are_those_of_live_requests(server: Api, alice: OpenAI) -> None:
    prompts = [f"Number {number}" for number in range(12)]
    batch = create(alice, [line(f"p{n}", prompt=prompt) for n, prompt in enumerate(prompts)], metadata={"for": "me"})
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 24 * 3600
    done = wait(alice, batch)
    assert done.status == "completed" and done.metadata == {"for": "me"} and done.error_file_id is None
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 12, 0)
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert all(times) and list(times) == sorted(times)  # type: ignore[type-var]
    found = records(alice, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"p{n}" for n in range(12)] and all(one["id"] for one in found)
    for prompt, one in zip(prompts, found, strict=True):
        live = alice.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4)
        assert one["error"] is None and one["response"]["status_code"] == 200
        body = openai.types.Completion.model_validate(one["response"]["body"])
        assert body.choices == live.choices and body.usage is not None and live.usage is not None
        assert body.usage.total_tokens == live.usage.total_tokens


def test_chats_and_embeddings(alice: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat = {"custom_id": "c", "method": "POST", "url": CHAT}
    chat["body"] = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}  # type: ignore[assignment]
    [one] = records(alice, wait(alice, create(alice, [chat], CHAT)).output_file_id)
    live = alice.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    assert one["response"]["body"]["choices"][0]["message"]["content"] == live.choices[0].message.content
    batch = create(alice, [line("e", EMBEDDINGS, input=["a b", "c"])], EMBEDDINGS)
    [one] = records(alice, wait(alice, batch).output_file_id)
    vectors = alice.embeddings.create(model=MODEL, input=["a b", "c"], encoding_format="float").data
    for ours, theirs in zip(one["response"]["body"]["data"], vectors, strict=True):
        np.testing.assert_allclose(ours["embedding"], theirs.embedding, atol=1e-5)


def test_lines_that_the_endpoint_refuses_are_in_the_error_file(alice: OpenAI) -> None:
    wrong = [line("typo", maxtokens=3), line("long", prompt="x" * 900), line("first", priority=0)]
    done = wait(alice, create(alice, [wrong[0], line("good"), *wrong[1:]]))
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 3)
    assert [one["custom_id"] for one in records(alice, done.output_file_id)] == ["good"]
    found = {one["custom_id"]: one["response"] for one in records(alice, done.error_file_id)}
    assert {name: each["status_code"] for name, each in found.items()} == {"typo": 400, "long": 400, "first": 400}
    assert "did you mean 'max_tokens'" in found["typo"]["body"]["error"]["message"]
    assert found["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "would go first" in found["first"]["body"]["error"]["message"]


BAD: list[tuple[list[Any], str, int | None, str]] = [
    ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3, "that of line 1"),
    ([{name: value for name, value in line("a").items() if name != "custom_id"}], "missing_custom_id", 1, "custom_id"),
    ([line(7)], "invalid_custom_id", 1, "string"),
    ([line("a"), "", "{nonsense"], "invalid_json_line", 3, "no JSON"),
    (["[1, 2]"], "invalid_json_line", 1, "no JSON object"),
    (["[" * 40], "invalid_json_line", 1, "deeper than 17"),
    (['{"custom_id": "a", "method": "POST", "body": NaN}'], "invalid_json_line", 1, "no JSON"),
    ([line("a", CHAT)], "mismatched_endpoint", 1, CHAT),
    ([line("a") | {"method": "GET"}], "invalid_method", 1, "POST"),
    ([line("a") | {"body": "text"}], "invalid_body", 1, "object"),
    ([line("a", stream=True)], "invalid_body", 1, "stream"),
    ([line("a") | {"surprise": 1}], "invalid_request", 1, "'surprise'"),
    ([line("a", model="tinny")], "model_not_found", 1, "'tinny' is not served; available: tiny"),
    ([line("a", prompt="x" * 5000), line("b")], "line_too_long", 1, "4096 bytes"),
    ([line(f"{n}") for n in range(41)], "too_many_lines", 41, "40 lines"),
    (["", " "], "empty_file", None, "no lines"),
]


@pytest.mark.parametrize(
    ("lines", "code", "number", "message"), BAD, ids=[one[1] + str(n) for n, one in enumerate(BAD)]
)
def test_a_wrong_file_fails_and_says_where(
    alice: OpenAI, lines: list[Any], code: str, number: int | None, message: str
) -> None:
    done = wait(alice, create(alice, lines))
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    [error] = done.errors.data
    assert (error.code, error.line) == (code, number) and message in str(error.message)


def test_all_wrong_lines_are_listed(alice: OpenAI) -> None:
    done = wait(alice, create(alice, ["{", line("a"), "}", line("a")]))
    assert done.errors is not None and [one.line for one in done.errors.data or ()] == [1, 3, 4]


def test_files(server: Api, alice: OpenAI) -> None:
    sent = json.dumps(line("a")) + "\n"
    made = alice.files.create(file=("my work.jsonl", sent.encode()), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("my work.jsonl", len(sent), "batch", "processed")
    assert alice.files.retrieve(made.id) == made and alice.files.content(made.id).content == sent.encode()
    assert next(iter(alice.files.list())) == made, "the newest first"
    assert next(iter(alice.files.list(limit=1))).id == made.id
    ids = [one.id for one in alice.files.list(limit=3, order="asc")]  # the client pages through all
    assert len(ids) == len(set(ids)) == len(list(alice.files.list())) and ids[-1] == made.id
    assert {one.purpose for one in alice.files.list(purpose="batch_output")} <= {"batch_output"}
    assert alice.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        alice.batches.create(input_file_id=made.id, endpoint=COMPLETIONS, completion_window="24h")


def test_another_tenant_sees_nothing(server: Api, alice: OpenAI) -> None:
    bob = server.client(BOB)
    done = wait(alice, create(alice, [line("a")]))
    assert done.output_file_id is not None
    assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
    for attempt in (
        lambda: bob.files.retrieve(done.input_file_id),
        lambda: bob.files.content(str(done.output_file_id)),
        lambda: bob.files.delete(done.input_file_id),
        lambda: bob.batches.retrieve(done.id),
        lambda: bob.batches.cancel(done.id),
        lambda: bob.batches.create(input_file_id=done.input_file_id, endpoint=COMPLETIONS, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    with pytest.raises(openai.AuthenticationError):
        server.client("nobody's key").batches.retrieve(done.id)
    assert next(iter(alice.batches.list(limit=2))).id == done.id


def test_wrong_uploads_and_batches(server: Api, alice: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        alice.files.create(file=b"x" * 30_000, purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose must be"):
        alice.files.create(file=b"{}", purpose="fine-tune")
    headers = {"authorization": f"Bearer {ALICE}"}
    chunked = server.http.post("/v1/files", headers={**headers, "content-type": "multipart/form-data; boundary=b"},
                               content=(b"x" * 10_000 for _ in range(4)))  # fmt: skip
    assert chunked.status_code in (400, 413)
    for sent, status in (
        ({"data": {"purpose": "batch"}}, 415),
        ({"files": {"purpose": (None, "batch")}}, 400),
        ({"files": {"file": ("f", b"{}")}}, 400),
        ({"files": {"file": ("f", b"{}"), "expires_after[anchor]": (None, "created_at")}, "data": {"purpose": "batch"}},
         400),
        ({"content": b"nonsense", "headers": {**headers, "content-type": "multipart/form-data"}}, 400),
    ):  # fmt: skip
        answer = server.http.post("/v1/files", **{"headers": headers, **sent})  # type: ignore[arg-type]
        assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    file = upload(alice, [line("a")])
    for wish, message in (
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ):
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h", **wish}
        answer = server.post("/v1/batches", body, headers=headers)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    for query in ("limit=0", "limit=101", "after=batch_none"):
        assert server.http.get(f"/v1/batches?{query}", headers=headers).status_code == 400
    parts = list((server.serving.batches.files.folder).glob("*.part"))  # type: ignore[union-attr]
    assert parts == [], "nothing is left of what was refused"


def test_a_server_without_a_folder_says_how(api: Api) -> None:
    for answer in (api.http.get("/v1/batches"), api.http.get("/v1/files"), api.http.get("/v1/files/file-1")):
        assert answer.status_code == 404 and "--batch-dir" in answer.json()["error"]["message"]


@pytest.fixture
def slow(house: House, tmp_path: Path) -> Iterator[tuple[Api, OpenAI]]:
    """Two lines at once, and requests a minute that end soon: what a batch waits for."""
    config = tmp_path / "serve.toml"
    config.write_text(
        "[limits]\nbatch_in_flight = 2\n"
        f'[[keys]]\nname = "alice"\nsecret = "{ALICE}"\nrequests_per_minute = 7\n'
        f'[[keys]]\nname = "b"\nsecret = "{BOB}"\n'
    )
    made = house.open(config, batch_dir=tmp_path / "kept")
    yield made, made.client(ALICE)


def progressed(client: OpenAI, batch: Batch, lines: int) -> bool:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts is not None and counts.completed >= lines


def test_cancelled_with_what_there_is_by_then(slow: tuple[Api, OpenAI]) -> None:
    """Of 7 requests a minute the upload and the batch are two."""
    server, alice = slow
    batch = create(alice, [line(f"p{n}") for n in range(9)])
    until(lambda: progressed(alice, batch, 5))
    with pytest.raises(openai.ConflictError, match="reads it"):
        alice.files.delete(batch.input_file_id)
    bob = server.client(BOB)
    assert wait(bob, create(bob, [line("b")])).status == "completed", "another key's batch does not wait for alice's"
    assert alice.batches.retrieve(batch.id).status == "in_progress"
    assert alice.batches.cancel(batch.id).status == "cancelling"
    done = wait(alice, batch)
    assert done.status == "cancelled" and done.cancelled_at and done.cancelling_at and not done.completed_at
    output, errors = records(alice, done.output_file_id), records(alice, done.error_file_id)
    assert (len(output), len(errors)) == (5, 4)
    assert sorted(one["custom_id"] for one in [*output, *errors]) == [f"p{n}" for n in range(9)]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"} and not any(
        one["response"] for one in errors
    )
    with pytest.raises(openai.ConflictError):
        alice.batches.cancel(batch.id)


def test_expired(slow: tuple[Api, OpenAI], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "SECONDS", 2)
    _, alice = slow
    done = wait(alice, create(alice, [line(f"p{n}") for n in range(8)]))
    assert done.status == "expired" and done.expired_at and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (5, 3)
    assert {one["error"]["code"] for one in records(alice, done.error_file_id)} == {"batch_expired"}


def test_another_server_goes_on(house: House, slow: tuple[Api, OpenAI], tmp_path: Path) -> None:
    """The first one ends in the middle; meanwhile nobody else may have its folder."""
    server, alice = slow
    kept = tmp_path / "kept"
    batch = create(alice, [line(f"p{n}") for n in range(20)])
    until(lambda: progressed(alice, batch, 5))
    with pytest.raises(LMWorksError, match="another server has it"):
        BatchService(kept)
    assert server.serving.batches is not None
    house.run(server.serving.batches.close())
    server.serving.batches = None
    written = read_lines(kept / "batches" / batch.id / "results.jsonl")
    with (kept / "batches" / batch.id / "results.jsonl").open("ab") as file:
        file.write(b'{"line":6,"ok":tr')  # as a kill leaves it
    other = house.open(keys_file(tmp_path / "other.toml"), batch_dir=kept)
    client = other.client(ALICE)
    done = wait(client, batch)
    found = records(client, done.output_file_id)
    assert done.status == "completed" and [one["custom_id"] for one in found] == [f"p{n}" for n in range(20)]
    assert len(written) == 5 and all(one["shown"] in found for one in written), "not computed again"


def test_a_key_that_is_gone(house: House, tmp_path: Path) -> None:
    config = keys_file(tmp_path / "serve.toml")
    first = house.open(config, batch_dir=tmp_path / "kept")
    alice = first.client(ALICE)
    batch = create(alice, [line("a")])
    assert wait(alice, batch).status == "completed"
    assert first.serving.batches is not None
    service = first.serving.batches
    made = batch_module.Batch.create(
        service.folder / "batch_1", tenant="alice", key="carol", endpoint=COMPLETIONS,
        input_file_id=batch.input_file_id, metadata=None,
    )  # fmt: skip
    service.batches[made.id] = made

    async def run() -> None:
        service.run(made)

    house.run(run())
    done = wait(alice, alice.batches.retrieve(made.id))
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert "'carol' that created this batch is gone" in str(done.errors.data[0].message)


def test_room_for_files(house: House, tmp_path: Path) -> None:
    server = house.open(keys_file(tmp_path / "serve.toml", "batch_stored_bytes = 1024\n"), batch_dir=tmp_path / "kept")
    alice, bob = server.client(ALICE), server.client(BOB)
    first = alice.files.create(file=b"x" * 1000, purpose="batch")
    with pytest.raises(openai.BadRequestError, match="delete some"):
        alice.files.create(file=b"x" * 25, purpose="batch")
    bob.files.create(file=b"x" * 25, purpose="batch")
    alice.files.delete(first.id)
    for _ in range(60):
        alice.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="there are 60 files"):
        alice.files.create(file=b"x", purpose="batch")


def test_live_requests_go_first(house: House, server: Api, alice: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stream = type(house.backend).stream

    def noted(self: Any, request: Any) -> Any:
        asked.append(request.priority)
        return stream(self, request)

    monkeypatch.setattr(type(house.backend), "stream", noted)
    wait(alice, create(alice, [line("a")]))
    alice.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert len(asked) == 2 and asked[0] > asked[1] == 0
