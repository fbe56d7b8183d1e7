"""The reference that the engine must equal token for token: greedy `generate` of transformers, in fp32.

A difference is excused only where the reference itself stands on a knife's edge, its two best logits closer than
`CLOSE`; whoever compares counts the excuses.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.model import GPT
from lmworks.model.hf import load_hf
from lmworks.spec import EngineSpec

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

CLOSE = 1e-4
VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96, "n_inner": 112,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "head_dim": 8, "first_k_dense_replace": 2, "num_mtp_layers": 0,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
BY_LAYER = {
    "num_hidden_layers": 3, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24,
                           "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}  # fmt: skip
# Of which all sequences here have the short factors: an engine takes one or the other by its context.
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 96, "factor": 2.0,
            "short_factor": [1.0 + i / 9 for i in range(6)], "long_factor": [1.5 + i for i in range(6)]}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "qwen3": ("qwen3", {**SHAPE, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "mellum": ("mellum", {**SHAPE, **BY_LAYER}),
    "phi3": ("phi3", {**SHAPE, "head_dim": 12, "pad_token_id": 0, "sliding_window": 11, "rope_scaling": LONGROPE}),
    "deepseek_v3": ("deepseek_v3", {**SHAPE, **LATENT}),
}
# Whose traits beyond those of the others are in the network, not in the engine.
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "qwen2_moe",
        {
            **SHAPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**SHAPE, **LATENT, **DEEPSEEK}),
    "deepseek_v3_experts": ("deepseek_v3", {**SHAPE, **LATENT, **DEEPSEEK, "n_group": 2, "topk_group": 1}),
    "ministral": ("ministral", {**SHAPE, "sliding_window": 7}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 7}),
    "qwen2": ("qwen2", SHAPE),
    "mixtral": ("mixtral", {**SHAPE, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
    "glm4": ("glm4", {**SHAPE, "pad_token_id": None}),
    "gemma": ("gemma", {**SHAPE, "num_key_value_heads": 1}),
    "olmoe": ("olmoe", {**SHAPE, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}),
    "glm4_moe": ("glm4_moe", {**SHAPE, **DEEPSEEK, "use_qk_norm": True}),
    "glm": ("glm", {**SHAPE, "pad_token_id": None}),
    "olmo2": ("olmo2", {**SHAPE, "pad_token_id": None}),
    "gemma2": ("gemma2", {**SHAPE, "num_hidden_layers": 3, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {
            **SHAPE,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
        },
    ),
    "starcoder2": ("starcoder2", {**SHAPE, "sliding_window": 11}),
    "smollm3": ("smollm3", {**SHAPE, "pad_token_id": None, "no_rope_layers": [0, 1]}),
    "granite": (
        "granite",
        {
            **SHAPE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
        },
    ),
}


@dataclass(frozen=True)
class Greedy:
    """What the reference answers, and by how much its best logit led at each place."""

    tokens: list[int]
    leads: list[float]


@cache
def reference_model(family: str) -> Any:
    """Random weights, norms and biases too: what is forgotten, swapped or transposed shows in the tokens."""
    kind, shape = (FAMILIES | MORE_FAMILIES)[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **shape)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@cache
def our_model(family: str) -> GPT:
    """The same weights in the trainer's network, by way of a folder as `save_pretrained` writes it."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        reference_model(family).save_pretrained(folder)
        return load_hf(GPT, Path(folder)).eval()


def fresh_model(family: str) -> GPT:
    """To be taken over by a runner, which changes it."""
    return copy.deepcopy(our_model(family))


@cache
def _greedy(family: str, prompt: tuple[int, ...], count: int) -> Greedy:
    out = reference_model(family).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return Greedy(out.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best])


def greedy(family: str, prompt: list[int], count: int) -> Greedy:
    return _greedy(family, tuple(prompt), count)


def excuses(expected: Greedy, tokens: list[int]) -> int:
    """0 where all tokens are equal, 1 where the first difference is excused; fails otherwise."""
    assert len(tokens) == len(expected.tokens)
    for place, (mine, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if mine != theirs:
            lead = expected.leads[place]
            assert lead < CLOSE, f"token {place} is {mine}, not {theirs}, which led by {lead:.2e}"
            return 1
    return 0


def random_prompts(lengths: list[int], seed: int = 0, prefix: int = 0) -> list[list[int]]:
    """The first `prefix` tokens are the same in all of them."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(0, VOCAB, (prefix,), generator=draw).tolist()
    return [common + torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def make_engine(family: str, device: str = "cpu", **spec: Any) -> Engine:
    given = {"dtype": "fp32", "block": 4, "max_seqs": 8, **spec}
    return Engine(ModelRunner(fresh_model(family), EngineSpec(**given), device, VOCAB), None)


def answers(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Result]:
    requests = [Request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for request in requests:
        engine.add(request)
    done = {piece.request.id: piece.result for piece in engine.run() if piece.result is not None}
    return [done[request.id] for request in requests]


def compare(engine: Engine, family: str, prompts: list[list[int]], counts: list[int], n: int = 1) -> int:
    """Every answer against the reference's; the number of excuses."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=n) for count in counts]
    total = 0
    for prompt, count, result in zip(prompts, counts, answers(engine, prompts, params), strict=True):
        assert result.error is None, result.error
        assert len(result.answers) == n
        expected = greedy(family, prompt, count)
        total += sum(excuses(expected, answer.token_ids) for answer in result.answers)
    return total
