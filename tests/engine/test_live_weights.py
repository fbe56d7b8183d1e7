"""New weights in a running engine: its outputs are those of an engine made from them."""

from __future__ import annotations

import pytest
import torch

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.live_weights import LiveWeights
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.model import GPT
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 64, "init_std": 0.3}
SHAPES = {
    "llama": {"kv_heads": 2},
    "tied": {"kv_heads": 2, "tie_embeddings": True, "qk_norm": True},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    "sinks": {"attention_sinks": True, "sliding_window": 8},
    "experts": {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "balance_bias": 0.1},
    "latent": {"kv_lora_rank": 16, "q_lora_rank": 8, "rope_head_dim": 4, "v_head_dim": 8},
}
PROMPT = [5, 9, 33, 2, 17, 40, 8, 8, 1, 60, 21, 3, 3, 50, 12, 30, 31, 7]  # longer than a block
ENGINE = EngineSpec(device="cpu", dtype="fp32", blocks=64, max_seqs=4, context=64)


def engine_of(model: GPT) -> Engine:
    return Engine(ModelRunner(model, ENGINE, "cpu", model.spec.vocab))


def answer(engine: Engine, tokens: int = 12) -> tuple[list[int], list[float]]:
    engine.add(Request(list(PROMPT), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)))
    (delta,) = engine.run()
    assert delta.result is not None and delta.result.error is None and delta.result.logprobs is not None
    return delta.result.token_ids, [one.logprob for one in delta.result.logprobs]


def runner(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


@pytest.mark.parametrize("shape", SHAPES)
def test_loaded_weights_give_the_answers_of_a_new_engine(shape: str) -> None:
    spec = ModelSpec(**{**SMALL, **SHAPES[shape]})
    engine, other = engine_of(GPT(spec, seed=1)), GPT(spec, seed=2)
    if shape == "experts":
        for name, buffer in other.named_buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
    before, want = answer(engine), answer(engine_of(copy_of(other)))
    assert before != want  # else loading nothing would pass
    given = [*other.named_parameters(), *other.named_buffers()]
    written = LiveWeights(runner(engine).model).load(given)
    engine.weights_changed()
    assert answer(engine) == want
    assert written == sum(tensor.nbytes for _, tensor in given)


def copy_of(model: GPT) -> GPT:
    copy = GPT(model.spec, seed=0)
    copy.load_state_dict(model.state_dict())
    return copy


def test_shared_weights_follow_the_trainer() -> None:
    spec = ModelSpec(**{**SMALL, **SHAPES["tied"]})
    trained = GPT(spec, seed=1)
    want_loss = trained(torch.tensor([PROMPT]), torch.tensor([[*PROMPT[1:], 0]]))[1].item()
    engine = engine_of(GPT(spec, seed=2))
    shared = LiveWeights(runner(engine).model).share(trained)
    assert shared == {name for name, _ in trained.named_parameters()}
    loss = trained(torch.tensor([PROMPT]), torch.tensor([[*PROMPT[1:], 0]]))[1]
    assert loss.item() == want_loss  # the trainer's numbers are what they were
    engine.weights_changed()
    before = answer(engine)
    assert before == answer(engine_of(copy_of(trained)))
    loss.backward()
    torch.optim.SGD(trained.parameters(), lr=1.0).step()  # in place: no copy to the engine
    engine.weights_changed()
    after = answer(engine)
    assert after == answer(engine_of(copy_of(trained))) and after != before


def test_the_prefix_cache_is_forgotten() -> None:
    spec = ModelSpec(**{**SMALL, **SHAPES["llama"]})
    engine = engine_of(GPT(spec, seed=1))
    answer(engine), answer(engine)
    assert engine.scheduler.prefix_hits == 16
    engine.weights_changed()
    answer(engine)
    assert engine.scheduler.prefix_hits == 16


def test_incomplete_or_unknown_weights_are_refused() -> None:
    spec = ModelSpec(**{**SMALL, **SHAPES["llama"]})
    weights = LiveWeights(runner(engine_of(GPT(spec, seed=1))).model)
    with pytest.raises(LMWorksError, match="no weight 'extra'"):
        weights.load([("extra", torch.zeros(1))])
    with pytest.raises(LMWorksError, match="20 weights of the engine's network were not given"):
        weights.load([("embed.weight", torch.zeros(64, 32))])


def test_weights_cannot_change_under_a_request() -> None:
    engine = engine_of(GPT(ModelSpec(**{**SMALL, **SHAPES["llama"]}), seed=1))
    engine.add(Request(list(PROMPT), SamplingParams(max_tokens=4)))
    with pytest.raises(LMWorksError, match="while requests are running"):
        engine.weights_changed()
