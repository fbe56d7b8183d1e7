"""Classes of published vulnerabilities of inference servers and their proxies (vLLM, LiteLLM, Ollama, TGI), each with a
test that would catch ours. Framing and paths on the wire: `test_smuggling.py`; numbers: `test_hostile.py`.
"""

from __future__ import annotations

import ast
import gzip
import json
import logging
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, Api, House, until

import lmworks
from lmworks.data.chat_template import compile_template
from lmworks.serve.keys import Config, digest
from lmworks.spec import SpecError
from smuggling import BODY, exchange, statuses

KEY, ADMIN = "a-key-of-alice", "a-key-of-the-admin"
FILE = f"""
[[keys]]
name = "alice"
secret = "{KEY}"
[[keys]]
name = "admin"
secret = "{ADMIN}"
admin = true
"""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(house: House, tmp_path_factory: pytest.TempPathFactory) -> Api:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "serve.toml").write_text(FILE)
    return house.open(folder / "serve.toml", batch_dir=folder / "batches", profile_dir=folder / "profiles")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- authentication by path -------------------------------------------------------------------------------

OPEN = {"/health", "/ready", "/metrics", "/openapi.json", "/", "/version", "/is_sleeping"}  # docs/serving.md says so


def test_routes_want_a_key(locked: Api) -> None:
    """By the list of the application itself: a route that is added tomorrow is in it."""
    document = locked.http.get("/openapi.json").json()
    seen = 0
    for path, methods in document["paths"].items():
        for method in methods:
            if path in OPEN:
                continue
            url = path.replace("{model}", MODEL).replace("{", "").replace("}", "")
            answer = locked.http.request(method.upper(), url, json={})
            assert answer.status_code == 401, (method, path, answer.status_code)
            seen += 1
    assert seen > 25


SPELLINGS = [
    "//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/v1/models.", "/v1%2fmodels", "/%76%31/models",
    "/v1/./models", "/v1/x/../models", "/v1/models;x=1", "/v1\\models", "/v1/models%00", "/v1/models%20",
    "/./v1/models",
    "/health/../v1/models", "/health%2f..%2fv1/models", "/metrics/..;/v1/models", "http://127.0.0.1/v1/models",
    "/v1/models?key=x", "/v1/models#x", "/v1/models/tiny", "/v1/models/%2e%2e/health", "/v1/models//health",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_no_spelling_of_a_path_goes_around_the_keys(locked: Api, method: str) -> None:
    for path in SPELLINGS:
        extra = (
            "connection: close\r\nx-original-url: /health\r\nx-rewrite-url: /health\r\nx-forwarded-for: 127.0.0.1\r\n"
        )
        found = exchange(locked.port, f"{method} {path} HTTP/1.1\r\nhost: x\r\n{extra}\r\n".encode())
        assert statuses(found)[0] in (400, 401, 404, 405), (path, found)
        assert b'"object"' not in found and b'"owned_by"' not in found


def test_a_client_cannot_say_that_it_is_a_batch(locked: Api) -> None:
    """Lines of batches run on the key that created them: by the scope of the application, not by a header."""
    for name in ("x-batch-key", "lmworks.batch_key", "x-lmworks-batch", "x-lmworks-key", "x-user"):
        assert locked.http.get("/v1/models", headers={name: "admin"}).status_code == 401


# --- where requests lead ----------------------------------------------------------------------------------


@pytest.fixture
def trap() -> Iterator[tuple[str, list[int]]]:
    """A server that nobody should call."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as one:
        one.settimeout(0.05)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                try:
                    one.accept()[0].close()
                    calls.append(1)
                except OSError:
                    pass

        thread = threading.Thread(target=listen)
        thread.start()
        yield f"http://127.0.0.1:{one.getsockname()[1]}", calls
        time.sleep(0.1)
        over.set()
        thread.join()


def test_no_field_makes_the_server_fetch_anything(locked: Api, trap: tuple[str, list[int]], tmp_path: Path) -> None:
    """SSRF, and files of the server's disk: images, schemas by reference, templates, adapters, files of batches."""
    url, calls = trap
    secret = tmp_path / "secret.txt"
    secret.write_text("top-secret-content")
    for where in (f"{url}/x.png", "http://169.254.169.254/latest/meta-data", f"file://{secret}", str(secret)):
        image, audio, item, source = (
            [{"role": "user", "content": [part]}]
            for part in (
                {"type": "image_url", "image_url": {"url": where}},
                {"type": "input_audio", "input_audio": {"data": where, "format": "wav"}},
                {"type": "input_image", "image_url": where},
                {"type": "image", "source": {"type": "url", "url": where}},
            )
        )
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": where}}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", CHAT | {"messages": image}),
            ("/v1/chat/completions", CHAT | {"messages": audio}),
            ("/v1/chat/completions", CHAT | {"response_format": schema}),
            ("/v1/chat/completions", CHAT | {"chat_template": where}),
            ("/v1/chat/completions", CHAT | {"api_base": where}),
            ("/v1/chat/completions", CHAT | {"media_io_kwargs": {"image": where}}),
            ("/v1/responses", {"model": MODEL, "input": item}),
            ("/v1/messages", CHAT | {"messages": source}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": where}),
            ("/v1/batches", {"input_file_id": where, "endpoint": "/v1/chat/completions", "completion_window": "24h"}),
            ("/v1/batches", {"input_file_id": "x", "endpoint": where, "completion_window": "24h"}),
        ]  # fmt: skip
        for path, body in bodies:
            answer = locked.http.post(path, json=body, headers=bearer(ADMIN))
            assert 400 <= answer.status_code < 500, (path, body, answer.text)
            assert "top-secret" not in answer.text
        for path in (f"/v1/files/{where}", f"/v1/files/{where}/content", f"/v1/responses/{where}"):
            answer = locked.http.get(path, headers=bearer(ADMIN))
            assert answer.status_code == 404 and "top-secret" not in answer.text
    assert not calls


# --- templates of models ----------------------------------------------------------------------------------

TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{% for one in range(10**9) %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ (messages|map('attr', '__class__')|list)[0].mro() }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_models_stay_in_their_sandbox(template: str) -> None:
    """They come with weights from anywhere. What is not refused is empty: nothing of Python's shows."""
    try:
        found = compile_template(template, {})([{"role": "user", "content": "x"}])
    except SpecError:
        return
    assert not any(sign in found for sign in ("<class", "globals", "uid=", "<function", "<module")), found


def test_text_of_clients_is_no_template(locked: Api) -> None:
    """It is a value in one, whatever it looks like, also as a name of a tool or a variable."""
    attack = "{{ 7 * 191 }}{% for x in range(3) %}y{% endfor %}"
    tool = {"type": "function", "function": {"name": "f", "description": attack, "parameters": {"title": attack}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": attack}], "tools": [tool]}
    body |= {"chat_template_kwargs": {"mood": attack}}
    ids = locked.http.post("/tokenize", json=body, headers=bearer(KEY)).json()["tokens"]
    text = locked.http.post("/detokenize", json={"model": MODEL, "tokens": ids}, headers=bearer(KEY)).json()["prompt"]
    assert text.count("7 * 191") >= 3 and "1337" not in text and "yyy" not in text
    for name in ("messages", "tools"):
        kwargs = {"chat_template_kwargs": {name: []}}
        assert locked.http.post("/v1/chat/completions", json=CHAT | kwargs, headers=bearer(KEY)).status_code == 400


# --- bodies that grow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip"])
def test_compressed_bodies_are_not_unpacked(locked: Api, encoding: str) -> None:
    """A bomb: a kilobyte that would be a megabyte. Nothing here unpacks what a client sends."""
    bomb = json.dumps(CHAT | {"user": "a" * 2**20}).encode()
    packed = {"gzip": gzip.compress(bomb), "deflate": zlib.compress(bomb)}.get(encoding, gzip.compress(bomb))
    headers = {**bearer(KEY), "content-type": "application/json", "content-encoding": encoding}
    answer = locked.http.post("/v1/chat/completions", content=packed, headers=headers)
    assert answer.status_code in (400, 415) and len(packed) < 4096
    file = {"file": ("x.jsonl", packed, "application/gzip")}
    answer = locked.http.post("/v1/files", data={"purpose": "batch"}, files=file, headers=bearer(KEY))
    assert answer.status_code != 200 or answer.json()["bytes"] == len(packed)


BOMBS: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "(((((a{1,30}){1,30}){1,30}){1,30}){1,30}){1,30}"},
    "long alternatives": {"regex": "|".join(f"{i}.*{i}" for i in range(3000))},
    "backtracking": {"regex": "(a+)+b(a+)+c(.*)*d"},
    "grammar that calls itself": {"grammar": "root ::= root root | root root root | 'a'"},
    "grammar of many rules": {"grammar": "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(2000))},
    "choices": {"choice": ["a" * 60 + str(i) for i in range(2000)]},
    "references in a circle": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "references that double": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {
                    "type": "object",
                    "properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "ab"},
                    "required": ["a", "b"],
                }
                for i in range(25)
            }
            | {"d25": {"type": "string"}},
        }
    },
    "many items": {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    "a long pattern": {"json": {"type": "string", "pattern": "(x{1,100}){1,100}", "minLength": 10**8}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_grammar_bombs_end_in_time_and_hold_nobody_up(locked: Api, name: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "structured_outputs": BOMBS[name]}
    began = time.monotonic()
    answers: list[httpx.Response] = []
    sending = threading.Thread(
        target=lambda: answers.append(locked.http.post("/v1/completions", json=body, headers=bearer(KEY)))
    )
    sending.start()
    good = locked.http.post("/v1/completions", json=json.loads(BODY) | {"messages": None}, headers=bearer(ADMIN))
    waited = time.monotonic() - began
    sending.join(60)
    assert answers and answers[0].status_code in (200, 400, 503), name
    assert good.status_code in (200, 400) and waited < 10


# --- keys -------------------------------------------------------------------------------------------------


def test_digests_of_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the keys: how much of one is right cannot be told, whatever the comparison takes."""
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append((one, other)) or one == other)
    keys = [{"name": f"k{i}", "secret": f"secret-of-key-{i}"} for i in range(5)]
    config = Config.from_dict({"keys": keys})
    assert config.authenticate("secret-of-key-1").name == "k1"
    assert len(compared) == 5, "all, also behind the one that fits"
    assert {len(one) for pair in compared for one in pair} == {32}
    assert compared[0][0] == digest("secret-of-key-1")


def test_a_denied_request_is_in_the_log_without_its_key(locked: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lmworks.serve"):
        locked.http.get("/v1/models", headers={**bearer("a-wrong-key-123"), "x-request-id": "x\r\nforged: 1"[:1]})
        locked.http.post("/sleep", headers=bearer(KEY), json={})
        locked.http.post("/reset_prefix_cache", headers=bearer(ADMIN), json={})
        until(lambda: sum(one.getMessage() == "request" for one in caplog.records) == 3)
    records = [vars(one) for one in caplog.records]
    assert [one["status"] for one in records if one["msg"] == "request"] == [401, 403, 200]
    (audit,) = [one for one in records if one["msg"] == "admin"]
    assert (audit["action"], audit["key"], audit["model"]) == ("reset_prefix_cache", "admin", MODEL)
    assert not any(secret in str(one) for one in records for secret in ("a-wrong-key-123", KEY, ADMIN))


def test_cached_prefixes_are_told_by_tenant_and_salt(locked: Api) -> None:
    """What is cached shows in the time to the first token. Here it is counted: tokens that were not computed."""

    def cached(key: str, **salt: str) -> int:
        body = {"model": MODEL, "prompt": list(range(20, 200)), "max_tokens": 1} | salt
        usage = locked.http.post("/v1/completions", json=body, headers=bearer(key)).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(KEY, cache_salt="one") == 0
    assert cached(KEY, cache_salt="one") > 150, "the cache works"
    assert cached(KEY, cache_salt="two") == cached(KEY) == 0
    assert cached(ADMIN, cache_salt="one") == cached(ADMIN) == 0, "a salt that is guessed is not another tenant's"


# --- transport --------------------------------------------------------------------------------------------

# Who reads pickles, and from where: never from a socket that a stranger can open, or from a file of a stranger.
PICKLES = {
    "align/rollout_link.py": "the rendezvous store of one training job",
    "engine/__main__.py": "standard input of a process that its parent has started",
    "engine/tensor_parallel/executor.py": "pipes to processes that it has started",
    "engine/tensor_parallel/tp_worker.py": "a pipe from its parent",
    "serve/channel.py": "sockets that are inherited",
    "serve/engine_loop.py": "a socket that is inherited",
    "serve/engine_process.py": "a socket that is inherited",
    "serve/workers.py": "a socket that is inherited",
    "trace/memory.py": "snapshots of torch, by an unpickler that knows no classes",
    "learn/checking/recognise.py": "a pipe between forks of one check of the learner's own code",
    "tune/suggest.py": "a sweep's own folder",
}
CALLS = {"eval", "exec", "yaml.load", "os.system", "torch.load"}
RUNS = {"sandbox/python_program.py: exec", "parallel/local_ranks.py: torch.load"}  # in a sandbox; its own ranks
SIGNS = re.compile(r"pickle|dill|shelve|marshal|joblib|\b(eval|exec|system|load)\(")
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def test_nothing_unpickles_what_comes_over_a_network() -> None:
    """vLLM's class: pickled messages on a socket that listens. The gateway and the fleet have none at all."""
    found, root = set(), Path(lmworks.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if SIGNS.search(text) else ():
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if UNSAFE & {name.partition(".")[0] for name in names}:
                found.add(str(path.relative_to(root)))
            weights = isinstance(node, ast.Call) and any(
                one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords
            )
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS and not weights:
                found.add(f"{path.relative_to(root)}: {ast.unparse(node.func)}")
    assert found <= set(PICKLES) | RUNS, found - set(PICKLES) - RUNS
    assert not any(one.startswith(("gateway/", "fleet/")) for one in found)


def test_a_server_listens_on_one_port_alone(house: House) -> None:
    """Its engine and workers have sockets that are inherited, of no address."""
    inodes = {
        line.split()[9]: int(line.split()[1].rpartition(":")[2], 16)
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    engine = house.backend.handle
    assert engine is not None and inodes
    for one in Path(f"/proc/{engine.process.pid}/fd").iterdir():
        name = one.readlink().name
        assert name.removeprefix("socket:[").removesuffix("]") not in inodes, "the engine listens"
