"""Soft-capping (Gemma 2) and attention sinks (gpt-oss): attention, logits and loss are those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from lmworks.kernels.scores import soft_cap
from lmworks.kernels.training import cross_entropy
from lmworks.kernels.training.cross_entropy import linear_cross_entropy
from lmworks.model import GPT
from lmworks.model.attention import Pattern, dense, fastest_backend, reference
from lmworks.model.gpt import Attention
from lmworks.plan.memory.peak_memory import chunk_bytes
from lmworks.plan.network import Network, network
from lmworks.plan.ops import Workload
from lmworks.spec import ModelSpec, SpecError

BATCH, SEQ, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 48, 6, 2, 16
SHAPE: dict[str, Any] = {"hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "layers": 1}
BOTH: dict[str, Any] = {"attention_softcap": 1.0, "final_softcap": 2.0, "attention_sinks": True}
close = {"rtol": 1e-5, "atol": 1e-5}


def theirs_of(trait: str) -> nn.Module:
    common = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "num_hidden_layers": 1,
        "attn_implementation": "eager",
    }
    if trait == "softcap":
        config = transformers.Gemma2Config(**common, query_pre_attn_scalar=HEAD_DIM, attn_logit_softcapping=1.5)
        return Gemma2Attention(config, 0)
    return GptOssAttention(transformers.GptOssConfig(**common), 0)


def mask_of(window: int, documents: Tensor | None) -> Tensor:
    """What transformers adds to the scores: (batch, 1, seq, seq)."""
    hidden = ~Pattern(window, documents=documents).mask(SEQ, SEQ, torch.device("cpu"))
    return torch.zeros(BATCH, 1, SEQ, SEQ).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("trait", ["softcap", "sinks"])
def test_attention_is_that_of_transformers(trait: str, kind: str) -> None:
    """Result and gradients of inputs and weights. Scores go far beyond the cap; a cap after the mask would show keys
    that are hidden, a sink that is missing would change every weight."""
    draw = torch.Generator().manual_seed(0)
    traits = {"attention_softcap": 1.5} if trait == "softcap" else {"attention_sinks": True}
    spec = ModelSpec(**SHAPE, **traits, sliding_window=5 if kind == "window" else 0, positions="none")
    documents = (torch.rand(BATCH, SEQ, generator=draw) < 0.2).cumsum(1) if kind == "documents" else None
    theirs, ours = theirs_of(trait), Attention(spec, 0)
    names = {"q": "q_proj.weight", "k": "k_proj.weight", "v": "v_proj.weight", "out": "o_proj.weight"}
    pairs = [(f"{mine}.weight", their) for mine, their in names.items()]
    pairs += [("sinks", "sinks")] * (trait == "sinks")
    with torch.no_grad():
        for mine, their in pairs:
            value = torch.randn(ours.get_parameter(mine).shape, generator=draw)
            value *= 1.0 if mine == "sinks" else 0.5
            ours.get_parameter(mine).copy_(value)
            theirs.get_parameter(their).copy_(value)
    assert {name for name, _ in ours.named_parameters()} == {mine for mine, _ in pairs}

    x = torch.randn(BATCH, SEQ, HIDDEN, generator=draw)
    grad = torch.randn(BATCH, SEQ, HIDDEN, generator=draw) / 10
    half = HEAD_DIM // (2 if trait == "sinks" else 1)
    still = torch.ones(1, SEQ, half), torch.zeros(1, SEQ, half)  # no rotation
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(x_theirs, still, mask_of(spec.sliding_window, documents))[0]
    attend = dense(spec, torch.device("cpu"), documents)
    assert attend.backend == "reference"
    found = ours(x_ours, None, attend)
    torch.testing.assert_close(found, expected, **close)
    expected.backward(grad)
    found.backward(grad)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, **close)
    for mine, their in pairs:
        torch.testing.assert_close(ours.get_parameter(mine).grad, theirs.get_parameter(their).grad, **close)


def test_a_sink_takes_its_share() -> None:
    """One key of score 0: weight 1 / (1 + e^sink), by hand."""
    q, k = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 1, 4)
    v = torch.full((1, 1, 1, 4), 3.0)
    out = reference(q, k, v, Pattern(), torch.tensor([0.0, math.log(3)]))
    torch.testing.assert_close(out[0, 0], torch.tensor([[1.5] * 4, [0.75] * 4]))


def test_final_soft_capping_is_that_of_gemma_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, mean loss and the gradients of hidden states and head, from the states on, the loss in small chunks."""
    config = transformers.Gemma2Config(vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0,
        tie_word_embeddings=False)  # fmt: skip
    gemma = Gemma2ForCausalLM(config).eval()
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(2, 17, 32, generator=draw).requires_grad_()
    with torch.no_grad():
        gemma.lm_head.weight.normal_(0, 0.5, generator=draw)
    monkeypatch.setattr(gemma.model, "forward", lambda **_: BaseModelOutputWithPast(last_hidden_state=states))
    labels = torch.randint(0, 96, (2, 17), generator=draw)
    theirs = gemma(labels, labels=labels)
    weight = gemma.lm_head.weight
    torch.testing.assert_close(soft_cap(F.linear(states, weight), 2.0), theirs.logits, **close)
    expected = torch.autograd.grad(theirs.loss, (states, weight))
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 96 * 5)
    loss = linear_cross_entropy(states[:, :-1].flatten(0, 1), weight, labels[:, 1:].flatten(), softcap=2.0) / 32
    torch.testing.assert_close(loss, theirs.loss, **close)
    for ours, their in zip(torch.autograd.grad(loss, (states, weight)), expected, strict=True):
        torch.testing.assert_close(ours, their, **close)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_by_chunks_and_recompute_is_training(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients with documents and a window: whole logits against chunks, and each document alone."""
    spec = ModelSpec(hidden=32, heads=4, kv_heads=2, layers=2, vocab=64, context=SEQ, init_std=0.4, sliding_window=5,
                     **BOTH)  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (1, SEQ + 1), generator=draw)
    cut = 10
    documents = (torch.arange(SEQ) >= cut).long().unsqueeze(0)

    def gradients(model: GPT, *calls: dict[str, Any]) -> dict[str, Tensor]:
        losses = [model(**call, reduction="sum")[1] for call in calls]
        torch.stack(losses).sum().backward()
        return {"loss": torch.stack(losses).sum(), **{name: p.grad for name, p in model.named_parameters()}}

    alone = [{"tokens": tokens[:, a:b], "targets": tokens[:, a + 1 : b + 1]} for a, b in ((0, cut), (cut, SEQ))]
    expected = gradients(GPT(spec), *alone)
    assert all(float(grad.abs().max()) > 1e-4 for name, grad in expected.items() if name.endswith("sinks"))
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 64 * 7)
    model = GPT(spec)
    model.recompute = recompute
    packed = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "documents": documents, "keep_logits": False}
    for name, found in gradients(model, packed).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("key", "value"), [("attention_softcap", 50.0), ("attention_sinks", True)])
def test_what_cannot_compute_a_trait_refuses_by_key(key: str, value: object) -> None:
    for backend in ("sdpa", "flash"):
        with pytest.raises(SpecError, match=rf"'{backend}' cannot do model\.{key} = {value!r}; 'auto', 'reference'"):
            ModelSpec(**{key: value}, attention=backend)
    spec = ModelSpec(**{key: value})
    with pytest.raises(SpecError, match=rf"cannot express model\.{key} = {value!r}"):
        GPT(ModelSpec.from_preset("tiny", **{key: value})).save_hf("nowhere")
    cuda = torch.device("cuda")
    assert fastest_backend(spec, cuda, sparse=False, offset=0, seq=256) == "flex"
    assert fastest_backend(spec, cuda, sparse=False, offset=4, seq=256) == "reference"
    if key == "attention_sinks":
        with pytest.raises(SpecError, match=r"cannot train on a CPU.*use 'reference'"):
            GPT(ModelSpec(attention_sinks=True, attention="flex"))(torch.zeros(1, 4, dtype=torch.long))


def test_latent_attention_has_neither_trait() -> None:
    for key, value in (("attention_softcap", 5.0), ("attention_sinks", True)):
        with pytest.raises(SpecError, match=rf"model\.{key} = {value!r} does not go with latent attention"):
            ModelSpec(kv_lora_rank=16, **{key: value})


def test_what_the_planner_adds() -> None:
    """Passes over scores and logits, a chunk of derivatives and 4 bytes for each sink; no FLOPs of products."""
    plain, capped, sinks = (
        network(Workload(ModelSpec.from_preset("tiny", **traits, attention="reference"), 2, 64))
        for traits in ({}, {"attention_softcap": 5.0, "final_softcap": 5.0}, {"attention_sinks": True})
    )
    tokens, heads, scores = 128, plain.load.model.heads, 128 * plain.load.model.heads * 64

    def of(net: Network, what: str) -> float:
        return sum(getattr(k, what) * k.count for op in (*net.block, *net.loss) for k in (*op.forward, *op.backward))

    assert of(plain, "flops") == of(capped, "flops") == of(sinks, "flops")
    logits = tokens * plain.load.model.vocab
    assert of(capped, "bytes") - of(plain, "bytes") == 3 * 4 * (2 + 3) * scores + 5 * 4 * 2 * logits
    assert of(sinks, "bytes") - of(plain, "bytes") == 4 * (2 + 3) * scores

    def saved(net: Network) -> float:
        return sum(sum(op.saved) for op in net.block)

    assert saved(capped) - saved(plain) == 4 * scores
    assert saved(sinks) - saved(plain) == 4 * tokens * heads
    assert sinks.load.model.params - plain.load.model.params == plain.load.model.layers * heads
    assert chunk_bytes(capped.load, 0) - chunk_bytes(plain.load, 0) == 4 * plain.load.chunk_rows * 320


def test_no_family_writes_a_cap_of_logits() -> None:
    with pytest.raises(SpecError, match=r"cannot express model\.final_softcap = 30\.0"):
        GPT(ModelSpec.from_preset("tiny", final_softcap=30.0)).save_hf("nowhere")
