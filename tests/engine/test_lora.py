"""Adapters beside the weights give what transformers gives with the adapter merged into the weights, W + scale·B·A."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import VOCAB, answers, fresh_model, make_engine, random_prompts, reference_model
from safetensors.torch import save_file
from test_model_runner import Unrecorded
from torch import Tensor

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.lora.adapters import Adapters
from lmworks.engine.speculative.ngram import NgramProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.model import GPT
from lmworks.spec import CheckpointError, LMWorksError, ModelSpec, SpecError

LAYERS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "v_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "deepseek_v3": ["gate_proj", "up_proj", "down_proj"],
    "mellum": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "phi3": ["o_proj", "down_proj"],
    "starcoder2": ["q_proj", "v_proj", "c_fc"],
    "granite": ["q_proj", "o_proj", "up_proj"],
}


@dataclass(frozen=True)
class Made:
    """An adapter as its author has it."""

    config: dict[str, Any]
    pairs: dict[str, tuple[Tensor, Tensor]]  # A (rank, in) and B (out, rank), by the name of a layer in transformers

    def scale(self, layer: str) -> float:
        rank, alpha = self.pairs[layer][0].shape[0], self.config["lora_alpha"]
        alpha = self.config.get("alpha_pattern", {}).get(layer.rsplit(".", 1)[1], alpha)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def save(self, folder: Path, **changes: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({**self.config, **changes}))
        tensors = {}
        for layer, (a, b) in self.pairs.items():
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder


def make_adapter(family: str, targets: list[str], rank: int = 4, seed: int = 0, **config: Any) -> Made:
    """Random matrices, large enough to change what the model says."""
    luck = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in reference_model(family).named_modules():
        if name.rsplit(".", 1)[-1] in targets:
            out, into = module.weight.shape if family != "gpt2" else module.weight.shape[::-1]  # Conv1D is (in, out)
            own = config.get("rank_pattern", {}).get(name.rsplit(".", 1)[-1], rank)
            pairs[name] = tuple(0.2 * torch.randn(*shape, generator=luck) for shape in ((own, into), (out, own)))
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": targets, "bias": "none", **config}
    return Made(given, pairs)


def merged(family: str, adapter: Made | None) -> Any:
    """The reference with the adapter in its weights."""
    model = copy.deepcopy(reference_model(family))
    with torch.no_grad():
        for layer, (a, b) in adapter.pairs.items() if adapter else ():
            delta = adapter.scale(layer) * b @ a if adapter else b
            model.get_submodule(layer).weight += delta.t() if family == "gpt2" else delta
    return model


def greedy_of(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()
    return tokens


def expected_logprobs(family: str, adapter: Made | None, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits = merged(family, adapter)(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def two_adapters(family: str) -> dict[str | None, Made | None]:
    """Of different ranks and layers, the second with all that its config may say."""
    first = make_adapter(family, LAYERS[family], seed=1)
    last = LAYERS[family][-1]
    patterns = {"rank_pattern": {last: 2}, "alpha_pattern": {last: 3}}
    second = make_adapter(family, LAYERS[family][::2], rank=3, seed=2, use_rslora=True, lora_alpha=5, **patterns)
    return {None: None, "first": first, "second": second}


def engine_with(family: str, adapters: dict[str | None, Made | None], folder: Path, **spec: Any) -> Engine:
    engine = make_engine(family, **spec)
    add_adapters(engine, adapters, folder)
    return engine


def add_adapters(engine: Engine, adapters: dict[str | None, Made | None], folder: Path) -> None:
    for name, adapter in adapters.items():
        if name is not None and adapter is not None:
            engine.add_adapter(name, adapter.save(folder / name))


@pytest.mark.parametrize("family", LAYERS)
def test_a_batch_with_two_adapters_and_none(family: str, tmp_path: Path) -> None:
    adapters = two_adapters(family)
    all_at_once(family, adapters, engine_with(family, adapters, tmp_path), 1e-5)


def test_heads_in_another_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'model\.layers\.0\.self_attn\.q_proj' has heads in another order"):
        engine_with("glm", {"a": make_adapter("glm", ["q_proj"])}, tmp_path)


def all_at_once(family: str, adapters: dict[str | None, Made | None], engine: Engine, close: float) -> None:
    """All in one step; log-probabilities of prompt and answer are those of the merged weights."""
    prompts = random_prompts([9, 14, 5, 11, 7, 3])
    names = [*adapters, *adapters]
    params = [
        SamplingParams(temperature=0, max_tokens=6, adapter=name, logprobs=0, prompt_logprobs=0) for name in names
    ]
    before = engine.metrics.steps
    results = answers(engine, prompts, params)
    assert engine.metrics.steps - before < 10  # they did run together
    for name, result in zip(names, results, strict=True):
        assert result.prompt_logprobs is not None
        assert result.logprobs is not None
        found = [each.logprob for each in result.prompt_logprobs[1:] if each] + [x.logprob for x in result.logprobs]
        tokens = result.prompt_token_ids + result.token_ids
        expected = expected_logprobs(family, adapters[name], tokens)
        torch.testing.assert_close(torch.tensor(found), expected, atol=close, rtol=close)
    plain = expected_logprobs(family, None, results[1].prompt_token_ids)
    assert (plain - expected_logprobs(family, adapters["first"], results[1].prompt_token_ids)).abs().max() > 0.1


def test_adapters_differ_for_same_prompt(tmp_path: Path) -> None:
    """One after another: cached blocks of one adapter mean nothing to the next. With guesses, nothing changes."""
    adapters = two_adapters("llama")
    (prompt,) = random_prompts([30])
    engine = engine_with("llama", adapters, tmp_path)
    engine.speculator = Speculator(engine.spec, NgramProposer())
    for _ in range(2):
        for name, adapter in adapters.items():
            (result,) = answers(engine, [prompt], [SamplingParams(temperature=0, max_tokens=12, adapter=name)])
            assert result.token_ids == greedy_of(merged("llama", adapter), prompt, 12)
    assert engine.metrics.prefix_cache_hits >= 3 * 28  # in the second round each found its own


def test_adapter_mask_covers_steps_with_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for all sequences with all their guesses, where a step may have fewer tokens."""
    adapters = two_adapters("llama")
    engine = make_engine("llama", speculate="ngram", guesses=3, max_seqs=8, max_batch_tokens=12)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.graphs = Unrecorded(engine.runner)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    add_adapters(engine, adapters, tmp_path)
    engine.speculator = Speculator(engine.spec, NgramProposer())
    prompts = [prompt * 3 for prompt in random_prompts([7, 5, 6, 4])]
    names = [*adapters, None]
    params = [SamplingParams(temperature=0, max_tokens=16, adapter=name) for name in names]
    for prompt, name, result in zip(prompts, names, answers(engine, prompts, params), strict=True):
        assert result.token_ids == greedy_of(merged("llama", adapters[name]), prompt, 16)
    assert engine.metrics.proposed_guesses > 0


def test_batch_invariance(tmp_path: Path) -> None:
    adapters = two_adapters("qwen3")
    prompts = random_prompts([9, 14, 5])
    params = [SamplingParams(temperature=0, max_tokens=6, adapter=name, logprobs=0) for name in adapters]
    engine = engine_with("qwen3", adapters, tmp_path, batch_invariant=True, prefix_cache=False)
    together = answers(engine, prompts, params)
    for prompt, wishes, result in zip(prompts, params, together, strict=True):
        (alone,) = answers(engine, [prompt], [wishes])
        assert alone.logprobs == result.logprobs


def test_adapters_of_latent_attention_are_refused(tmp_path: Path) -> None:
    """The engine absorbs its projections: an adapter on them would be ignored."""
    folder = make_adapter("deepseek_v3", ["q_b_proj"]).save(tmp_path / "adapter")
    with pytest.raises(SpecError, match=r"it changes blocks\.0\.attention\.q_b\.weight.*plain layers only"):
        make_engine("deepseek_v3").add_adapter("one", folder)


def test_unknown_adapter_does_not_affect_others(tmp_path: Path) -> None:
    engine = engine_with("llama", two_adapters("llama"), tmp_path)
    params = [SamplingParams(temperature=0, max_tokens=4, adapter=name) for name in ("first", "frist", None)]
    good, bad, other = answers(engine, random_prompts([4, 5, 6]), params)
    assert bad.finish_reason == "error"
    assert bad.error == "adapter 'frist' is not loaded; did you mean 'first'?"
    assert len(good.token_ids) == len(other.token_ids) == 4


def test_adapter_overflow_does_not_spread(tmp_path: Path) -> None:
    """All numbers of the adapter are within fp16, and its products are not: the others do not see it."""
    wild = make_adapter("llama", LAYERS["llama"])
    for down, _ in wild.pairs.values():
        down.copy_(down.sign() * 6e4)
    first = two_adapters("llama")["first"]
    names = [None, "first", "wild", None]
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0, adapter=name) for name in names]
    prompts = random_prompts([9, 5, 7, 12])
    exact: dict[str, Any] = {"dtype": "fp16", "batch_invariant": True, "prefix_cache": False}
    engine = engine_with("llama", {"first": first, "wild": wild}, tmp_path, **exact)
    found = answers(engine, prompts, params)
    assert found[2].error is not None and "not finite" in found[2].error
    found[2:3] = answers(engine, prompts[2:3], [params[0]])  # in the memory of the one that overflowed, perhaps
    tame = engine_with(
        "llama", {"first": first, "wild": make_adapter("llama", LAYERS["llama"])}, tmp_path / "tame", **exact
    )
    expected = answers(tame, prompts, [params[0], params[1], params[0], params[0]])
    assert [each.logprobs for each in found] == [each.logprobs for each in expected]


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported; it must be 'LORA'"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported; it must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported; it must be True"),
        ({"r": 5}, "has rank 4, but adapter_config.json says 5"),
        ({"lora_alpha": None}, "lora_alpha = None: a number is expected"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan: a number is expected"),
        ({"lora_alpha": math.inf}, "lora_alpha = inf: a number is expected"),
        ({"lora_alpha": 10**400}, "lora_alpha = 10{57,}: a number is expected"),
        ({"lora_alpha": 1e300}, r"q_proj\.lora_B' has numbers up to .*e\+299, .*: no engine\.dtype reaches that"),
    ],
)
def test_unsupported_adapters_are_rejected(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    engine = make_engine("llama")
    folder = make_adapter("llama", ["q_proj"]).save(tmp_path / "adapter", **changes)
    with pytest.raises(LMWorksError, match=says):
        engine.add_adapter("mine", folder)
    (result,) = answers(engine, [[1, 2]], [SamplingParams(max_tokens=2)])  # the engine goes on without it
    assert len(result.token_ids) == 2


def test_unknown_target_layers_are_rejected(tmp_path: Path) -> None:
    a, b = torch.ones(4, 48), torch.ones(VOCAB, 4)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    engine = make_engine("llama")
    with pytest.raises(SpecError, match="it changes 'lm_head', which is not a linear layer in a block"):
        engine.add_adapter("head", Made(config, {"lm_head": (a, b)}).save(tmp_path / "head"))
    wide = Made(config, {"model.layers.0.self_attn.q_proj": (torch.ones(4, 40), torch.ones(64, 4))})
    with pytest.raises(CheckpointError, match="is 64 × 48 in this model, but the adapter was made for 64 × 40"):
        engine.add_adapter("wide", wide.save(tmp_path / "wide"))
    torn = Made(config, {"model.layers.0.self_attn.q_proj": (torch.ones(4, 48), torch.ones(64, 3))})
    with pytest.raises(CheckpointError, match="do not fit together"):
        engine.add_adapter("torn", torn.save(tmp_path / "torn"))
    flat = Made(config, {"model.layers.0.self_attn.q_proj": (torch.ones(4), torch.ones(64, 4))})
    with pytest.raises(CheckpointError, match="do not fit together"):
        engine.add_adapter("flat", flat.save(tmp_path / "flat"))
    none = Made({**config, "r": 0}, {"model.layers.0.self_attn.q_proj": (torch.ones(0, 48), torch.ones(64, 0))})
    with pytest.raises(CheckpointError, match="do not fit together"):
        engine.add_adapter("none", none.save(tmp_path / "none"))


@pytest.mark.parametrize(
    ("dtype", "side", "value", "says"),
    [
        ("fp32", "A", math.nan, "holds NaN or infinity: the file is damaged, or the training diverged"),
        ("fp16", "B", -math.inf, "holds NaN or infinity: the file is damaged, or the training diverged"),
        (
            "fp16",
            "A",
            1e5,
            r"has numbers up to 1e\+05, .* but float16 ends at 6\.55e\+04: use engine\.dtype = 'bf16' or",
        ),
        ("fp16", "B", -4e4, r"has numbers up to 8e\+04, its scale included, but float16 ends at 6\.55e\+04"),
        ("bf16", "B", 3e38, r"has numbers up to 6e\+38, .* bfloat16 ends at 3\.39e\+38: no engine\.dtype reaches that"),
    ],
)
def test_unrepresentable_values_are_rejected(dtype: str, side: str, value: float, says: str, tmp_path: Path) -> None:
    """By the name of their tensor; the others go on."""
    made = make_adapter("llama", ["q_proj", "down_proj"])
    made.pairs["model.layers.1.mlp.down_proj"]["AB".index(side)][1, 2] = value
    engine = engine_with("llama", {"first": two_adapters("llama")["first"]}, tmp_path, dtype=dtype)
    params = [SamplingParams(temperature=0, max_tokens=3, adapter=name) for name in (None, "first")]
    before = answers(engine, [[1, 2]] * 2, params)
    with pytest.raises(
        LMWorksError, match=rf"bad/adapter_model\.safetensors: 'model\.layers\.1\.mlp\.down_proj\.lora_{side}' {says}"
    ):
        engine.add_adapter("bad", made.save(tmp_path / "bad"))
    after = answers(engine, [[1, 2]] * 2, params)
    assert [each.token_ids for each in after] == [each.token_ids for each in before]
    if dtype == "fp16" and math.isfinite(value):
        make_engine("llama", dtype="bf16").add_adapter("bad", tmp_path / "bad")


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("value", [{"(": 4}, ["q_proj"], 4])
def test_invalid_patterns_are_rejected(key: str, value: Any, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, key: value}
    made = Made(config, {"model.layers.0.self_attn.q_proj": (torch.ones(4, 48), torch.ones(64, 4))})
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: rank_pattern or alpha_pattern cannot be read"):
        make_engine("llama").add_adapter("mine", made.save(tmp_path / "mine"))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    engine = make_engine("llama")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: no such file"):
        engine.add_adapter("mine", tmp_path)
    folder = make_adapter("llama", ["q_proj"]).save(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        engine.add_adapter("mine", folder)
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, path)
    with pytest.raises(SpecError, match="is not a LoRA matrix of a linear layer"):
        engine.add_adapter("mine", folder)


def test_duplicate_adapter_name_is_rejected(tmp_path: Path) -> None:
    engine = engine_with("llama", two_adapters("llama"), tmp_path)
    with pytest.raises(SpecError, match="an adapter named 'first' exists already"):
        engine.add_adapter("first", tmp_path / "second")
    with pytest.raises(SpecError, match="an adapter needs a name"):  # without one its cached prefixes were the model's
        engine.add_adapter("", tmp_path / "second")


def test_mismatched_adapter_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = two_adapters("llama")
    engine = engine_with("llama", {"first": made["first"]}, tmp_path)
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0, adapter=name) for name in ("first", None)]
    before = answers(engine, [[1, 2, 3]] * 2, params)
    room = iter([Adapters.write])  # for the first of both
    monkeypatch.setattr(Adapters, "write", lambda *given: next(room, no_room)(*given))
    with pytest.raises(LMWorksError, match=r"second: the adapter does not fit the device \(out of memory\)"):
        engine.add_adapter("second", made["second"].save(tmp_path / "second"))
    monkeypatch.undo()
    assert [each.logprobs for each in answers(engine, [[1, 2, 3]] * 2, params)] == [each.logprobs for each in before]
    engine.add_adapter("second", tmp_path / "second")


def test_adapters_that_come_and_go_are_written_into_free_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks and layers; what is left of those that were unloaded changes nothing."""
    every, few = LAYERS["llama"], LAYERS["llama"][::2]
    made = {
        name: make_adapter("llama", layers, rank=rank, seed=seed)
        for seed, (name, layers, rank) in enumerate(
            [("a", every, 3), ("b", few, 4), ("c", every, 2), ("d", every, 2), ("e", few, 2), ("f", every, 5)]
        )
    }
    stacked: list[int] = []
    stack = Adapters.stack
    monkeypatch.setattr(Adapters, "stack", lambda self, given: (stacked.append(len(given)), stack(self, given))[1])
    engine = engine_with("llama", {name: made[name] for name in "abc"}, tmp_path)
    engine.remove_adapter("b")
    assert stacked == [1, 2, 3]
    for name in "de":  # both where b was
        engine.add_adapter(name, made[name].save(tmp_path / name))
    loaded = engine.runner.adapters
    assert isinstance(loaded, Adapters) and stacked == [1, 2, 3]
    assert {name: (slot.row, slot.begin) for name, slot in loaded.loaded.items()} == {
        "a": (1, 0), "c": (3, 7), "d": (2, 3), "e": (4, 5),
    }  # fmt: skip

    def compare(names: str) -> None:
        fresh = engine_with("llama", {name: made[name] for name in names}, tmp_path / f"fresh-{names}")
        params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0, adapter=name) for name in (None, *names)]
        found, want = (answers(one, [[1, 2, 3]] * len(params), params) for one in (engine, fresh))
        for one, other in zip(found, want, strict=True):
            assert one.token_ids == other.token_ids
            assert [each.logprob for each in one.logprobs or ()] == pytest.approx(
                [each.logprob for each in other.logprobs or ()], abs=1e-5
            )
        assert len({tuple(each.token_ids) for each in want}) > 2

    compare("acde")
    engine.remove_adapter("d")
    write = Adapters.write
    monkeypatch.setattr(Adapters, "write", lambda *given: no_room(write(*given)))
    with pytest.raises(LMWorksError, match="out of memory"):
        engine.add_adapter("d", tmp_path / "d")
    monkeypatch.undo()
    compare("ace")
    engine.add_adapter("f", made["f"].save(tmp_path / "f"))  # wider than any free columns
    compare("acef")


def no_room(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_experts_take_adapters_on_attention_only(tmp_path: Path) -> None:
    """A layer of experts is no plain layer: an adapter that changes one is refused by its name."""
    from lmworks.spec import EngineSpec

    shape = {"layers": 1, "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": VOCAB, "context": 32}
    spec = ModelSpec.from_dict({**shape, "experts": 4, "expert_ffn": 32, "norm_eps": 1e-5})
    engine = Engine(ModelRunner(GPT(spec), EngineSpec(dtype="fp32", blocks=20), "cpu", VOCAB))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    attention = {"model.layers.0.self_attn.o_proj": (torch.ones(2, 64), torch.ones(48, 2))}
    engine.add_adapter("attention", Made(config, attention).save(tmp_path / "attention"))
    expert = {"model.layers.0.block_sparse_moe.experts.0.w1": (torch.ones(2, 48), torch.ones(32, 2))}
    with pytest.raises(SpecError, match="which is not a linear layer in a block"):
        engine.add_adapter("expert", Made(config, expert).save(tmp_path / "expert"))


def test_sequences_without_an_adapter_are_unchanged(tmp_path: Path) -> None:
    """A row without an adapter is computed as if there were none, to the last bit."""
    prompts = random_prompts([9, 14])
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0)] * 2
    plain = answers(make_engine("gpt2"), prompts, params)
    beside = answers(engine_with("gpt2", two_adapters("gpt2"), tmp_path), prompts, params)
    assert [result.logprobs for result in plain] == [result.logprobs for result in beside]
    assert fresh_model("gpt2").spec.qkv_bias  # the merged layer has a bias, which stays
