"""Keys over HTTP: who is let in, how much each may use, and what is not told to anyone."""

from __future__ import annotations

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from api_server import MODEL, Api, House, until
from tiny_engine import HELD

from lmworks.serve.keys import Settings, digest
from lmworks.serve.telemetry import JSONFormatter

ALICE, BOB, CAROL, DAVE = "alice-alice", "bob-bob-bob", "carol-carol", "dave-dave-dave"
FRANK = "frank-frank"  # of whom nothing is refused before: that would be charged, too
GATEWAY = "gateway-key"
CONFIG = f"""
[limits]
n = 4
max_tokens = 300
[[keys]]
name = "alice"
sha256 = "{digest(ALICE).hex()}"
[[keys]]
name = "bob"
secret = "{BOB}"
requests_per_minute = 3
[[keys]]
name = "carol"
secret = "{CAROL}"
models = ["another"]
[[keys]]
name = "dave"
secret = "{DAVE}"
tokens_per_minute = 1000
max_tokens = 10
[[keys]]
name = "frank"
secret = "{FRANK}"
tokens_per_minute = 1000
[[keys]]
name = "gateway"
secret = "{GATEWAY}"
gateway = true
"""
SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
BODY = SHORT | {"ignore_eos": True}
ARGUMENTS = SHORT | {"extra_body": {"ignore_eos": True}}  # of OpenAI's client


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def locked(house: House, config: Path) -> Api:
    return house.open(config)


@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/v1/models/tiny"])
@pytest.mark.parametrize(
    "shown",
    [
        None,
        "Bearer",
        ALICE,
        f"Basic {ALICE}",
        "Bearer wrong-wrong",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        "Bearer é",
    ],
)
def test_missing_key_reveals_nothing(locked: Api, path: str, shown: str | None) -> None:
    headers = {} if shown is None else {"authorization": shown.encode()}
    answer = locked.http.get(path, headers=headers)
    assert answer.status_code == 401 and answer.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.http.post("/v1/completions", content=b"{" * 10**6, headers=headers).status_code == 401


def test_the_right_key(locked: Api) -> None:
    client = locked.client(ALICE)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.completions.create(**ARGUMENTS).usage.completion_tokens == 2  # type: ignore[call-overload]
    with pytest.raises(openai.AuthenticationError):
        locked.client("wrong-wrong").completions.create(**ARGUMENTS)  # type: ignore[call-overload]


def test_model_not_allowed_for_key(locked: Api) -> None:
    client = locked.client(CAROL)
    assert list(client.models.list()) == []
    with pytest.raises(openai.PermissionDeniedError):
        client.completions.create(**ARGUMENTS)  # type: ignore[call-overload]


def test_what_only_gateways_may(locked: Api) -> None:
    """To say what another server has answered, to follow the prefix caches, and to see where KV blocks are."""
    going_on = BODY | {"stream": True, "continuation": {"answers": [[65, 66]]}}
    for key, status in ((ALICE, 403), (GATEWAY, 200)):
        answer = locked.http.post("/v1/completions", json=going_on, headers=header(key))
        assert answer.status_code == status, answer.text
        with locked.http.stream("GET", "/cache_events", headers=header(key)) as events:
            assert events.status_code == status
            assert status != 200 or next(events.iter_lines()).startswith(":")
        assert locked.http.get("/kv_transfer", headers=header(key)).status_code == status
    begun = locked.http.post("/v1/completions", json=BODY | {"stream": True, "continuation": {}}, headers=header(ALICE))
    assert begun.status_code == 200 and ": tokens 0 " in begun.text


def test_limits_of_one_request(locked: Api) -> None:
    for change, param in (({"n": 5}, "n"), ({"max_tokens": 301}, "max_tokens")):
        answer = locked.post("/v1/completions", BODY | change, headers=header(ALICE))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert locked.post("/v1/completions", BODY | {"max_tokens": 11}, headers=header(DAVE)).status_code == 400


def test_requests_per_minute_with_concurrent_clients(locked: Api) -> None:
    def ask(_: int) -> tuple[int, str | None]:
        answer = locked.post("/v1/completions", BODY, headers=header(BOB))
        return answer.status_code, answer.headers.get("retry-after")

    with ThreadPoolExecutor(200) as many:
        found = list(many.map(ask, range(200)))
    assert sorted(status for status, _ in found) == [200] * 3 + [429] * 197
    assert all(1 <= int(wait or 0) <= 60 for status, wait in found if status == 429)
    assert locked.post("/v1/completions", BODY, headers=header(ALICE)).status_code == 200


def test_tokens_per_minute_charge_used_tokens(locked: Api) -> None:
    body = BODY | {"prompt": [7] * 100, "max_tokens": 10, "ignore_eos": True}
    statuses = [locked.post("/v1/completions", body, headers=header(FRANK)).status_code for _ in range(12)]
    assert statuses == [200] * 9 + [429] * 3, "110 tokens each, 1,000 a minute"


LONG = BODY | {"max_tokens": 400, "ignore_eos": True, "n": 16, "seed": HELD}  # until its client leaves


def test_full_queue_returns_429_with_retry_after(house: House, tmp_path: Path) -> None:
    """64 answers at once and none that waits: four requests of 16."""
    path = tmp_path / "full.toml"
    path.write_text("[limits]\nqueue = 0\n")
    api = house.open(path)
    with ExitStack() as stack:
        for _ in range(4):
            stream = stack.enter_context(api.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}))
            assert stream.status_code == 200
        found = api.post("/v1/completions", BODY)
        with pytest.raises(openai.RateLimitError):
            api.client().completions.create(**ARGUMENTS)  # type: ignore[call-overload]
    until(lambda: house.idle() and not sum(api.serving.rate_limiter.open.values()))
    assert found.status_code == 429 and found.json()["error"]["code"] == "queue_full"
    assert int(found.headers["retry-after"]) >= 1
    assert api.post("/v1/completions", BODY).status_code == 200


def test_request_timeout(house: House, tmp_path: Path) -> None:
    path = tmp_path / "hasty.toml"
    path.write_text("[limits]\nrequest_seconds = 0.15\n")
    api = house.open(path)
    found = api.post("/v1/completions", LONG)
    assert found.status_code == 504 and found.json()["error"]["code"] == "request_timeout"
    for _ in range(100):  # a busy machine may take that long before it begins
        streamed = api.post("/v1/completions", LONG | {"stream": True}).text.strip().splitlines()
        assert "not finished within 0.15 s" in streamed[-1]
        if len(streamed) > 2:
            break
    assert len(streamed) > 2
    until(house.idle)


def test_keys_do_not_share_prefix_cache(locked: Api, house: House, tmp_path: Path) -> None:
    body = BODY | {"prompt": list(range(1, 201)), "max_tokens": 1}

    def cached(api: Api, key: str) -> int:
        usage = api.post("/v1/completions", body, headers=header(key)).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    other = "another-key-of-bob"
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsecret = "{ALICE}"\n[[keys]]\nname = "b"\nsecret = "{other}"\n')
    apart = house.open(path)
    assert (cached(apart, ALICE), cached(apart, other)) == (0, 0)
    assert cached(apart, ALICE) > 150 and cached(apart, other) > 150, "each finds its own"
    path.write_text(f"share_cache = true\n{path.read_text()}")
    shared = house.open(path)
    body["prompt"] = list(range(50, 250))
    assert cached(shared, ALICE) == 0 and cached(shared, other) > 150


def test_config_is_reloaded(locked: Api, config: Path) -> None:
    new = "erins-new-key"
    assert locked.http.get("/v1/models", headers=header(new)).status_code == 401
    config.write_text(CONFIG + f'[[keys]]\nname = "erin"\nsecret = "{new}"\n')
    until(lambda: locked.http.get("/v1/models", headers=header(new)).status_code == 200)
    config.write_text("[[keys]]\nname = 5")
    time.sleep(1.1)
    assert locked.http.get("/v1/models", headers=header(new)).status_code == 200, "a bad file changes nothing"
    config.write_text(CONFIG)


def test_logs_contain_usage_but_no_content(locked: Api, caplog: pytest.LogCaptureFixture) -> None:
    secret = "Xylophone-Quasar"
    with caplog.at_level(logging.DEBUG):
        headers = {**header(ALICE), "x-request-id": "my-id.1"}
        good = locked.post("/v1/completions", BODY | {"prompt": secret, "user": secret}, headers=headers)
        locked.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": secret}]}, headers=headers)
        locked.post(f"/v1/{secret}?q={secret}", {"model": secret}, headers={**headers, "x-request-id": secret + "!"})
        locked.post("/v1/completions", BODY | {"model": secret}, headers=headers)
        locked.post("/v1/completions", BODY | {"guided_regex": f"({secret}"}, headers=headers)
        locked.http.get(f"/v1/models/{secret}", headers=header(secret))
    written = "\n".join(
        JSONFormatter().format(record) for record in caplog.records if record.name.startswith("lmworks")
    )
    lines = [json.loads(line) for line in written.splitlines()]
    assert good.headers["x-request-id"] == "my-id.1"
    (line,) = [line for line in lines if line.get("request_id") == "my-id.1" and line["status"] == 200]
    assert line["key"] == "alice" and line["prompt_tokens"] == len(secret) and line["completion_tokens"] == 2
    assert secret not in written and ALICE not in written


def test_documented_config_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "serve.toml"
    path.write_text(text.replace("…", "0" * 64))
    config = Settings(path).current()
    assert [config.tenant(key) for key in config.keys] == ["alice", "alice"] and config.limits.queue_seconds == 60


def test_public_endpoints(locked: Api) -> None:
    for path in ("/health", "/ready", "/metrics", "/openapi.json", "/"):
        assert locked.http.get(path).status_code == 200
    metrics = locked.http.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_sum", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    ):  # fmt: skip
        assert f"\nlmworks:{name}{{" in metrics, name


def test_cors_origins(locked: Api, house: House) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in locked.http.get("/health", headers=asked).headers
    open_to_one = house.open(origins=["https://app.example"])
    found = open_to_one.http.options("/v1/completions", headers=asked)
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://app.example"
    wrong = open_to_one.post("/v1/completions", BODY | {"n": 0}, headers={"origin": "https://app.example"})
    assert wrong.status_code == 400 and "access-control-allow-origin" in wrong.headers, "errors can be read, too"
    other = open_to_one.http.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def local_api(house: House) -> Api:
    return house.open(local=True, origins=["https://app.example"])


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),
        ({"host": "localhost"}, None),
        ({"host": "LocalHost:8000"}, None),
        ({"host": "127.0.0.1:1"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, None),
        ({"origin": "https://app.example"}, None),
        ({"host": "evil.example"}, "foreign_host"),
        ({"host": "127.0.0.1.evil.example:80"}, "foreign_host"),
        ({"host": "localhost.evil.example"}, "foreign_host"),
        ({"host": "192.0.2.1"}, "foreign_host"),
        ({"origin": "https://evil.example"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, "foreign_origin"),
    ],
)
def test_foreign_origin_is_rejected_without_keys(local_api: Api, headers: dict[str, str], code: str | None) -> None:
    """DNS rebinding: a page's own name, which its author lets stand for 127.0.0.1."""
    api, body = local_api, BODY | {"max_tokens": 1}
    for found in (api.http.get("/health", headers=headers), api.post("/v1/completions", body, headers=headers)):
        assert found.status_code == (200 if code is None else 403), found.text
        assert code is None or found.json()["error"]["code"] == code


def test_host_is_not_checked_with_keys(house: House) -> None:
    api = house.open(keys=[ALICE], local=True)
    assert api.post("/v1/completions", BODY, headers={**header(ALICE), "host": "my.name"}).status_code == 200
