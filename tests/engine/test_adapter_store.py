"""A thousand adapters registered, fifty loaded: answers are those of an engine that has loaded its adapters before."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_kv_tiers import KINDS, MIB, PREFIX, make_engine
from test_sleep import DENSE, SMALL

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.lora.adapters import Adapters
from lmworks.spec import ModelSpec, SpecError
from tiny import write_adapter
from variations import with_slow

REGISTERED, WARM, DISTINCT = 1000, 50, 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many folders, over the files of a few."""
    root = tmp_path_factory.mktemp("adapters")
    for number in range(REGISTERED):
        folder = root / name_of(number)
        if number < DISTINCT:
            write_adapter(folder, ModelSpec(**{**SMALL, **DENSE}), seed=number)
            continue
        folder.mkdir()
        for file in (root / name_of(number % DISTINCT)).iterdir():
            os.link(file, folder / file.name)
    return root


def name_of(number: int) -> str:
    return f"team-{number:04d}"


def asked(number: int | None, max_tokens: int = 4) -> Request:
    name = None if number is None else name_of(number)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, adapter=name)
    return Request(PREFIX[:9], params, stream=False)


def answers(engine: Engine, requests: list[Request]) -> list[Result]:
    for request in requests:
        engine.add(request)
    found = {delta.request.id: delta.result for delta in engine.run()}
    return [result for request in requests if (result := found[request.id]) is not None]


@pytest.mark.parametrize("warm", with_slow([6, WARM], [WARM]))
def test_a_thousand_registered_and_few_warm_answer_as_preloaded(
    store: Path, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiers=False, adapter_store=str(store), warm_adapters=warm)
    preloaded = make_engine(tiers=False)
    distinct = min(warm + 4, DISTINCT)
    for number in range(distinct):
        preloaded.add_adapter(name_of(number), store / name_of(number))
    assert len(engine.adapter_names) == REGISTERED and not engine.adapters
    chance = random.Random(0)
    # Of the names, only those over files that are preloaded, too.
    known = [number for number in range(REGISTERED) if number % DISTINCT < distinct]
    numbers = [*range(distinct), *(chance.choice(known) for _ in range(15))]
    stacked: list[int] = []
    stack = Adapters.stack
    with monkeypatch.context() as patch:
        patch.setattr(Adapters, "stack", lambda self, given: (stacked.append(len(given)), stack(self, given))[1])
        found = answers(engine, [asked(number) for number in numbers])
    assert stacked == [1], "there is room for all warm ones from the first on"
    want = answers(preloaded, [asked(number % DISTINCT) for number in numbers])
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    assert len({tuple(each.token_ids) for each in want}) > 5  # the adapters matter
    assert engine.adapters == set(engine.metrics.warm_adapters) and len(engine.adapters) == warm
    assert engine.metrics.adapter_loads > warm
    last = list(dict.fromkeys(reversed(numbers)))[: warm // 2]
    loads = engine.metrics.adapter_loads
    answers(engine, [asked(number) for number in last])  # warm: the latest are kept
    assert engine.metrics.adapter_loads == loads


def test_adapters_in_use_stay_and_others_wait(store: Path) -> None:
    engine = make_engine(tiers=False, adapter_store=str(store), warm_adapters=2)
    want = [result.token_ids for number in range(4) for result in answers(engine, [asked(number, 6)])]
    requests = [asked(number, 6) for number in range(4)]
    for request in requests:
        engine.add(request)
    assert engine.adapters == {name_of(0), name_of(1)} and engine.cold == requests[2:]
    assert engine.cancel(requests[3].id)
    done = {delta.request.id: delta.result for delta in engine.run()}
    assert [result.token_ids for each in requests[:3] if (result := done[each.id])] == want[:3]
    cancelled = done[requests[3].id]
    assert cancelled is not None and cancelled.finish_reason == "cancelled"
    assert not engine.cold and not engine.busy


def test_broken_adapter_fails_its_request_alone(store: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", ModelSpec(**{**SMALL, **DENSE}), seed=3)
    write_adapter(tmp_path / "broken", ModelSpec(**{**SMALL, **DENSE}), seed=3)
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    (tmp_path / "no-adapter").mkdir()
    engine = make_engine(tiers=False, adapter_store=str(tmp_path), warm_adapters=1)
    assert engine.adapter_names == {"good", "broken"}

    def named(name: str) -> Request:
        return Request(PREFIX[:9], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, adapter=name))

    found = answers(engine, [named("good"), named("broken"), named("good"), named("missing")])
    assert [each.error is None for each in found] == [True, False, True, False]
    assert "is not loaded" in (found[3].error or "")
    with pytest.raises(SpecError, match="there is no such folder"):
        make_engine(tiers=False, adapter_store=str(tmp_path / "elsewhere"))


def test_prefixes_stay_when_adapters_change_places_and_go_when_a_name_changes(store: Path, tmp_path: Path) -> None:
    """In the device's cache, and on disk over restarts."""
    options: dict[str, Any] = {"kv_host_gib": MIB, "kv_disk": str(tmp_path / "kv"), "kv_disk_gib": MIB}
    engine = make_engine(blocks=100, adapter_store=str(store), warm_adapters=1, **options)
    [first] = answers(engine, [asked(1)])
    answers(engine, [asked(2)])
    assert engine.adapters == {name_of(2)}
    [again] = answers(engine, [asked(1)])
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 8)
    engine.close()
    # Another adapter under its name.
    other = tmp_path / "other"
    write_adapter(other / name_of(1), ModelSpec(**{**SMALL, **DENSE}), seed=99)
    changed = make_engine(blocks=100, adapter_store=str(other), **options)
    [found] = answers(changed, [asked(1)])
    assert found.cached_tokens == 0
    changed.add_adapter("more", store / name_of(2))
    changed.remove_adapter(name_of(1))
    changed.add_adapter(name_of(1), store / name_of(1))
    [back] = answers(changed, [asked(1)])
    assert back.token_ids == first.token_ids and back.cached_tokens == 8  # found on disk, not what was on the device
    assert changed.metrics.external_prefix_cache_hits == 8
    changed.close()


def test_moe_model_takes_adapters_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its attention: experts have none."""
    monkeypatch.setitem(KINDS, "mixtral", ({"experts": 4, "top_k": 2, "expert_ffn": 16}, "auto"))
    for number in range(3):
        folder = tmp_path / "store" / f"a{number}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 64}))
        start, luck = "base_model.model.model.layers.0.self_attn.o_proj.lora", torch.Generator().manual_seed(number)
        pair = {f"{start}_A.weight": (2, 32), f"{start}_B.weight": (32, 2)}
        tensors = {name: torch.randn(*shape, generator=luck) for name, shape in pair.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
    engine = make_engine("mixtral", tiers=False, adapter_store=str(tmp_path / "store"), warm_adapters=1)
    preloaded = make_engine("mixtral", tiers=False)
    for number in range(3):
        preloaded.add_adapter(f"a{number}", tmp_path / "store" / f"a{number}")

    def requests() -> list[Request]:
        kinds = [
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, adapter=f"a{number}") for number in range(3)
        ]
        return [Request(PREFIX[:9], params) for params in kinds]

    want = [each.token_ids for each in answers(preloaded, requests())]
    assert [each.token_ids for each in answers(engine, requests())] == want and len(set(map(tuple, want))) > 1
