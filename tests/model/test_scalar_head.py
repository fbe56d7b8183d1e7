"""A scalar head: values equal those of transformers' sequence classifier, in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, LlamaConfig

from lmworks.model import GPT
from lmworks.model.hf import read_config
from lmworks.parallel.initial_weights import source_of
from lmworks.spec import ModelSpec, RunSpec, SpecError

LLAMA = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=32, scalar_head=True)
GPT2 = ModelSpec(
    layers=2, hidden=32, heads=4, ffn=128, vocab=64, context=32, norm="layer", positions="learned", mlp="gelu",
    bias=True, tie_embeddings=True, scalar_head=True,
)  # fmt: skip
TOKENS = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_values_equal_those_of_transformers(spec: ModelSpec, tmp_path: Path) -> None:
    model = GPT(spec, seed=3)
    model.save_hf(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.num_labels == 1
    with torch.no_grad():
        values, scores = model(TOKENS), theirs(TOKENS).logits
    assert values.shape == TOKENS.shape
    torch.testing.assert_close(values[:, -1:], scores, atol=1e-5, rtol=1e-5)
    back = GPT.from_hf(tmp_path)
    assert back.spec.scalar_head and not back.spec.tie_embeddings
    torch.testing.assert_close(back(TOKENS), values)


@pytest.mark.parametrize("config", [LlamaConfig, GPT2Config])
def test_a_classifier_of_transformers_is_read(config: type, tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"intermediate_size": 48, "max_position_embeddings": 32, "num_labels": 1}
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(config(**small)).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(GPT.from_hf(tmp_path)(TOKENS)[:, -1:], theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_a_classifier_with_two_labels_is_refused(tmp_path: Path) -> None:
    GPT(LLAMA).save_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(SpecError, match="a classifier with 2 labels is not supported"):
        read_config(tmp_path)


def test_a_reward_model_starts_as_a_language_model_with_a_new_head(tmp_path: Path) -> None:
    body = LLAMA.replace(scalar_head=False, tie_embeddings=True)
    language_model = GPT(body, seed=5)
    language_model.save_hf(tmp_path)
    spec = RunSpec.from_dict({
        "model": {**body.to_dict()}, "align": {"method": "reward"}, "data": {"seq": 16, "path": "pairs.jsonl"},
        "checkpoint": {"init": str(tmp_path)},
    })  # fmt: skip
    assert spec.model.scalar_head
    weights = source_of(spec)
    want = dict(language_model.named_parameters())
    for name, parameter in GPT(spec.model).named_parameters():
        if name != "score.weight":
            assert torch.equal(weights(name, parameter.shape), want[name])
    score = weights("score.weight", torch.Size([1, 32]))
    assert 0.1 < float(score.std()) * 33**0.5 < 2  # 1/√(width + 1)


def test_pretraining_a_scalar_head_is_refused() -> None:
    with pytest.raises(SpecError, match=r"align\.method = 'reward'"):
        RunSpec.from_dict({"model": {"scalar_head": True}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_no_view(dtype: torch.dtype) -> None:
    """FSDP2 warns of modules that return one."""
    values = GPT(LLAMA).to(dtype)(torch.zeros(1, 3, dtype=torch.long))
    assert values.dtype == torch.float32 and not values._is_view()
