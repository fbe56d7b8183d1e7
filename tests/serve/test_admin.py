"""Operations over HTTP: sleep, caches, adapters loaded and unloaded while requests run; who may, and what is logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from api_server import MODEL, Api, House, twin, until
from safetensors.torch import save_file

import lmworks
from lmworks.serve.backend import ModelCard
from lmworks.serve.serving import Upstream

RANK = 4


def make_adapter(folder: Path, seed: int) -> torch.Tensor:
    """An adapter of the queries, in PEFT's format; what it adds to their weight."""
    draw = torch.Generator().manual_seed(seed)
    down, up = torch.randn(RANK, 32, generator=draw), torch.randn(32, RANK, generator=draw)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    return 2.0 * up @ down


def logprobs_by_hand(prompt: str, delta: torch.Tensor | None) -> list[float]:
    model = twin()
    if delta is not None:
        with torch.no_grad():
            model.blocks["0"].attention.q.weight.add_(delta)  # type: ignore[union-attr, operator]
    tokens = torch.tensor([[*prompt.encode()]])
    found = torch.log_softmax(model(tokens)[0, :-1].double(), dim=-1).gather(1, tokens[0, 1:, None])
    return list(found[:, 0].tolist())


def logprobs(api: Api, model: str, prompt: str) -> list[float]:
    [choice] = api.complete(model=model, prompt=prompt, prompt_logprobs=0, max_tokens=1)["choices"]
    tables = choice["prompt_logprobs"][1:]
    return [table[str(token)]["logprob"] for table, token in zip(tables, prompt.encode()[1:], strict=True)]


@pytest.fixture
def server(house: House, tmp_path: Path) -> Iterator[Api]:
    made = house.open()
    made.serving.adapter_root = tmp_path / "adapters"
    (tmp_path / "adapters").mkdir()
    yield made
    for name in house.backend.card.adapters:
        made.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_version(api: Api) -> None:
    assert api.http.get("/version").json() == {"version": lmworks.__version__}


def test_an_engine_sleeps_and_wakes(server: Api) -> None:
    before = server.complete(max_tokens=8)["choices"]
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.post("/sleep", None).json() == {"model": MODEL, "action": "sleep"}
    try:
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
        refused = server.post("/v1/completions", {"model": MODEL, "prompt": "Hi"})
        assert refused.status_code == 503 and "POST /wake_up" in refused.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200  # not to be restarted
        assert server.http.get("/ready").status_code == 503  # nor sent requests
    finally:
        assert server.post("/wake_up", None).status_code == 200
    assert server.http.get("/ready").status_code == 200
    assert server.complete(max_tokens=8)["choices"] == before


def test_requests_under_way_keep_it_awake(server: Api) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 400, "seed": tiny_engine.HELD, "stream": True}
    body |= {"ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # kept: closing it would cancel the request
        assert '"finish_reason":null' in next(lines)
        refused = server.post("/sleep", None)
        assert refused.status_code == 409 and "requests are running" in refused.json()["error"]["message"]
    until(server.house.idle)


def test_the_prefix_cache_is_forgotten(server: Api) -> None:
    cached = []
    for reset in (False, False, True):
        if reset:
            assert server.post("/reset_prefix_cache", None).status_code == 200
        usage = server.complete(prompt="A prompt of this test alone, twice and once more.", max_tokens=1)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert [count > 0 for count in cached] == [False, True, False]


def test_adapters_are_loaded_and_unloaded(server: Api, tmp_path: Path) -> None:
    """Under one name first one, then another: neither finds the other's cached prefixes."""
    prompt = "A prompt that fills more than one block of the cache."
    assert logprobs(server, MODEL, prompt) == pytest.approx(logprobs_by_hand(prompt, None), abs=1e-4)
    digests = set()
    for seed in (1, 2):
        delta = make_adapter(tmp_path / "adapters" / f"v{seed}", seed)
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": f"v{seed}"})
        assert loaded.status_code == 200, loaded.text
        digests.add(loaded.json()["sha256"])
        listed = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
        assert listed["poet"]["parent"] == MODEL
        for _ in range(2):
            server.complete(model="poet", prompt=prompt)  # into the cache
            assert logprobs(server, "poet", prompt) == pytest.approx(logprobs_by_hand(prompt, delta), abs=1e-4)
        again = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": f"v{seed}"})
        assert again.status_code == 409
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
        assert server.post("/v1/completions", {"model": "poet", "prompt": "Hi"}).status_code == 404
    assert len(digests) == 2


def test_requests_finish_with_their_adapter(server: Api, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapters" / "slow", 3)
    assert server.post("/v1/load_lora_adapter", {"lora_name": "slow", "lora_path": "slow"}).status_code == 200
    whole = server.complete(model="slow", max_tokens=200, temperature=0, ignore_eos=True)["choices"][0]["text"]
    body = {"model": "slow", "prompt": "Hello", "max_tokens": 200, "temperature": 0, "seed": tiny_engine.HELD}
    body |= {"ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "slow"}).status_code == 200
        assert server.post("/v1/completions", {"model": "slow", "prompt": "Hi"}).status_code == 404
        early = server.post("/v1/load_lora_adapter", {"lora_name": "slow", "lora_path": "slow"})
        assert early.status_code == 409 and "still use" in early.json()["error"]["message"]
        server.complete(max_tokens=1)  # the held one goes on beside another
        lines_after = [first, *lines] if release(server) else []
    parts = [json.loads(line[6:]) for line in lines_after if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole
    assert server.post("/v1/load_lora_adapter", {"lora_name": "slow", "lora_path": "slow"}).status_code == 200


def release(server: Api) -> bool:
    import signal

    handle = server.house.backend.handle
    assert handle is not None
    handle.process.send_signal(signal.SIGCONT)
    return True


BAD: list[tuple[str, int, str]] = [
    ("../outside", 403, "not below"),
    ("/etc", 403, "not below"),
    ("link", 403, "not below"),
    ("nowhere", 404, "no folder there"),
    ("a\0b", 400, "NUL"),
    ("a" * 300, 404, "no folder there"),
    ("files", 403, "not below"),
]


@pytest.mark.parametrize(("path", "status", "message"), BAD, ids=[f"{path[:20]!r}" for path, *_ in BAD])
def test_only_folders_below_the_root(server: Api, tmp_path: Path, path: str, status: int, message: str) -> None:
    make_adapter(tmp_path / "outside", 1)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "adapters" / "files").mkdir()
    for file in (tmp_path / "outside").iterdir():
        (tmp_path / "adapters" / "files" / file.name).symlink_to(file)
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_unknown_adapters_and_servers_without_a_root(api: Api) -> None:
    assert api.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 404
    refused = api.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"})
    assert refused.status_code == 403 and "--adapter-root" in refused.json()["error"]["message"]


def test_who_may_and_what_is_logged(house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "serve.toml"
    keys = [("boss", "true"), ("user", "false")]
    config.write_text("\n".join(f'[[keys]]\nname = "{n}"\nsecret = "secret-{n}-12345"\nadmin = {a}\n' for n, a in keys))
    made = house.open(config=config)
    statuses: dict[str, Any] = {}
    with caplog.at_level(logging.INFO, logger="lmworks.serve"):
        for name, _ in keys:
            headers = {"authorization": f"Bearer secret-{name}-12345"}
            statuses[name] = made.post("/reset_prefix_cache", None, headers=headers).status_code
    assert statuses == {"boss": 200, "user": 403}
    [entry] = [record for record in caplog.records if record.getMessage() == "admin"]
    assert (entry.action, entry.key, entry.model) == ("reset_prefix_cache", "boss", MODEL)  # type: ignore[attr-defined]


PAGES = {
    "a page of another site": {"origin": "https://example.org"},
    "a name that resolves here": {"host": "example.org"},
    "behind a proxy": {"x-forwarded-for": "203.0.113.9"},
}


@pytest.mark.parametrize("name", PAGES)
def test_without_keys_only_programs_of_this_machine(house: House, name: str) -> None:
    """A server that others reach (`local` is not set) does not take every request from loopback for its owner's."""
    made = house.open()
    assert made.post("/reset_prefix_cache", None).status_code == 200
    refused = made.post("/reset_prefix_cache", None, headers=PAGES[name])
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_only", refused.text


def test_an_adapter_takes_no_name_that_its_key_cannot_see(house: House, tmp_path: Path) -> None:
    """Requests of others for that model would go to the adapter."""
    config = tmp_path / "serve.toml"
    config.write_text('[[keys]]\nname = "boss"\nsecret = "secret-boss-12345"\nadmin = true\nmodels = ["tiny"]\n')
    upstream = Upstream("http://127.0.0.1:9/v1")
    upstream.cards = [ModelCard("hidden", 0, 0, 0)]
    made = house.open(config=config)
    made.serving.upstreams.append(upstream)
    made.serving.adapter_root = tmp_path / "adapters"
    make_adapter(tmp_path / "adapters" / "v1", 1)
    body = {"model": MODEL, "lora_name": "hidden", "lora_path": "v1"}
    refused = made.post("/v1/load_lora_adapter", body, headers={"authorization": "Bearer secret-boss-12345"})
    assert refused.status_code == 409 and "hidden" not in house.backend.card.adapters, refused.text
