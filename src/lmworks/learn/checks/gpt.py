"""Exercises 1 to 7, `src/models/gpt.py`: against PyTorch's own functions, and a loss worked out by hand."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..checking.expect import Mismatch, expect_close, expect_equal


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rmsnorm(gpt: ModuleType) -> None:
    layer = gpt.RMSNorm(2)
    x = torch.tensor([[3.0, 4.0]])
    expect_close("one vector", layer(x), x / math.sqrt(12.5), rtol=1e-5, x=x)
    for shape in ((2, 4), (2, 3, 8)):
        layer, x = gpt.RMSNorm(shape[-1], eps=0.5), numbers(*shape) * 3 + 1
        layer.weight.data = numbers(shape[-1], seed=1)
        expected = F.rms_norm(x, shape[-1:], layer.weight, eps=0.5)
        expect_close(f"shape {shape}, with weights and eps 0.5", layer(x), expected, x=x, weight=layer.weight)


def rotate_half(gpt: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expect_close("[1, 2, 3, 4]", gpt.rotate_half(x), torch.tensor([-3.0, -4.0, 1.0, 2.0]), x=x)
    x = numbers(1, 2, 3, 6)
    expected = torch.stack((-x[..., 3], -x[..., 4], -x[..., 5], x[..., 0], x[..., 1], x[..., 2]), -1)
    kept = x.clone()
    expect_close("a batch of heads", gpt.rotate_half(x), expected, x=x)
    expect_close("the input itself is left as it was", x, kept)


def rotary(gpt: ModuleType) -> None:
    angle = torch.tensor([[0.0, 0.0], [math.pi / 2, math.pi / 2]])
    q = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).view(1, 1, 2, 2)
    k = torch.tensor([[0.0, 2.0], [0.0, 2.0]]).view(1, 1, 2, 2)
    got = gpt.apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Mismatch("what is returned", "a tuple (q, k)", got)
    quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
    expect_close("position 0 stays, position 1 makes a quarter turn: q", got[0], quarter, q=q, angle=angle)
    quarter = torch.tensor([[0.0, 2.0], [-2.0, 0.0]]).view(1, 1, 2, 2)
    expect_close("position 0 stays, position 1 makes a quarter turn: k", got[1], quarter, k=k, angle=angle)
    cos, sin = gpt.rotary_tables(gpt.SIZES["tiny"])
    q, k = numbers(1, 1, 1, 8).expand(2, 4, 10, 8), numbers(1, 1, 1, 8, seed=1).expand(2, 4, 10, 8)
    q, k = gpt.apply_rotary_pos_emb(q, k, cos[:10], sin[:10])
    expect_equal("the shape of q", tuple(q.shape), (2, 4, 10, 8))
    scores = q[0, 0] @ k[0, 0].T
    for distance in range(10):
        along = scores.diagonal(-distance)
        remark = "query · key has to depend on the distance of their positions alone"
        expect_close(
            f"scores at distance {distance}", along, along[:1].expand_as(along).clone(), atol=1e-4, remark=remark
        )


def swiglu(gpt: ModuleType) -> None:
    for config, x in ((gpt.GPTConfig(hidden_size=1, intermediate_size=1), torch.tensor([[2.0]])),
                      (gpt.SIZES["tiny"], numbers(2, 3, 32))):  # fmt: skip
        torch.manual_seed(0)
        mlp = gpt.MLP(config)
        if config.hidden_size == 1:
            for layer, weight in ((mlp.gate_proj, 1.0), (mlp.up_proj, 3.0), (mlp.down_proj, 5.0)):
                layer.weight.data.fill_(weight)
        gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
        expected = (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T
        case = "one number: gate 1, up 3, down 5" if config.hidden_size == 1 else "width 32"
        expect_close(case, mlp(x), expected, atol=1e-5, x=x)


class FusedCalls(TorchFunctionMode):
    """Notices whoever calls PyTorch's own attention, by whatever name it was imported."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def attention(gpt: ModuleType) -> None:
    for seq, heads in ((1, 1), (2, 1), (5, 4)):
        torch.manual_seed(seq)
        config = gpt.GPTConfig(hidden_size=8 * heads, num_heads=heads, max_seq_len=8)
        layer = gpt.CausalSelfAttention(config)
        x = numbers(2 if heads > 1 else 1, seq, 8 * heads, seed=seq)
        cos, sin = gpt.rotary_tables(config)
        with FusedCalls() as fused:
            got = layer(x, cos, sin)
        remark = "the plain branch computes scores, mask and softmax itself; the other branch has PyTorch's own already"
        expect_equal("calls of PyTorch's own attention", fused.seen, [], remark=remark)
        layer.use_flash = True
        expected = layer(x, cos, sin)
        expect_close(f"{seq} position{'s' * (seq > 1)}, {heads} head{'s' * (heads > 1)}", got, expected, atol=1e-5, x=x)
    layer.use_flash = False
    changed = x.clone()
    changed[:, -1] += 1
    remark = "the last token was changed, and earlier positions noticed it: they see the future"
    expect_close("no look ahead", layer(changed, cos, sin)[:, :-1], got[:, :-1], atol=1e-6, remark=remark)
    large = 300 * x
    remark = "scores are large here; softmax has to be stable"
    expect_equal("large values", bool(layer(large, cos, sin).isfinite().all()), True, remark=remark)


def init_weights(gpt: ModuleType) -> None:
    config = gpt.GPTConfig(vocab_size=4, hidden_size=4, num_layers=1, num_heads=1, intermediate_size=4, init_std=0.5)
    model = gpt.GPT(config)

    def initialise(module: Any) -> Any:
        torch.manual_seed(0)
        model._init_weights(module)
        return module

    biased = nn.Linear(300, 300)
    biased.bias.data.fill_(7.0)
    initialise(biased)
    for name, weight in (("Linear", biased.weight), ("Embedding", initialise(nn.Embedding(300, 300)).weight)):
        about = "weights have mean 0 and standard deviation 0.5 (config.init_std)"
        mean, std = weight.mean().item(), weight.std().item()
        expect_close(f"nn.{name}: mean", torch.tensor(mean), torch.tensor(0.0), atol=0.015, remark=about)
        expect_close(f"nn.{name}: standard deviation", torch.tensor(std), torch.tensor(0.5), rtol=0.05, remark=about)
    beyond = (biased.weight.abs() > 1.0).float().mean().item()
    about = f"4.6 % of a normal distribution lie beyond two standard deviations; here {beyond:.1%}"
    expect_equal("a normal distribution", 0.035 < beyond < 0.06, True, remark=about)
    expect_close("biases of nn.Linear", biased.bias, torch.zeros(300), remark="biases begin at zero")
    norm = gpt.RMSNorm(3)
    expect_close("the weights of norms", initialise(norm).weight, torch.ones(3), remark="norms keep their ones")
    initialise(nn.Linear(3, 3, bias=False))  # has no bias to set


def reference_logits(model: Any, tokens: Tensor) -> Tensor:
    """Block by block, by hand."""
    x = model.embed.weight[tokens]
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x), model.cos, model.sin)
        x = x + block.mlp(block.mlp_norm(x))
    return model.norm(x) @ model.lm_head.weight.T


def gpt_forward(gpt: ModuleType) -> None:
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocab_size=5, max_seq_len=8, hidden_size=4, num_layers=2, num_heads=1, intermediate_size=4,
                           init_std=0.6)  # fmt: skip
    model = gpt.GPT(config)
    tokens = torch.tensor([[1, 2, 3]])
    got = model(tokens)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch("what is returned", "a tuple (logits, loss)", got)
    logits = reference_logits(model, tokens)
    expect_close("logits of three tokens", got[0], logits, atol=1e-5, tokens=tokens)
    expect_equal("the loss without labels", got[1], None)
    logprobs = logits.log_softmax(-1)[0]
    expected = -(logprobs[0, 2] + logprobs[1, 3]) / 2
    loss = model(tokens, labels=tokens)[1]
    remark = "position 0 predicts token 1, position 1 predicts token 2; the last position has nothing to predict"
    expect_close("the loss of three tokens", loss, expected, tokens=tokens, remark=remark)
    labels = torch.tensor([[1, -100, 3]])
    loss = model(tokens, labels=labels)[1]
    remark = "a label of −100 counts for nothing, also in the mean"
    expect_close("a label that is not counted", loss, -logprobs[1, 3], labels=labels, remark=remark)
    tokens = torch.randint(0, 5, (3, 8), generator=torch.Generator().manual_seed(1))
    expect_close("logits of a batch", model(tokens)[0], reference_logits(model, tokens), atol=1e-5)
    checkpointing(gpt, config, tokens)


def checkpointing(gpt: ModuleType, config: Any, tokens: Tensor) -> None:
    changes: dict[str, Any] = {**vars(config), "gradient_checkpointing": True}
    torch.manual_seed(0)
    plain, lean = gpt.GPT(config), gpt.GPT(type(config)(**changes))
    lean.load_state_dict(plain.state_dict())
    calls: list[bool] = []
    list(lean.blocks)[-1].attention_norm.register_forward_pre_hook(lambda *_: calls.append(True))
    _, loss = lean(tokens, labels=tokens)
    once = len(calls)
    loss.backward()
    remark = "with gradient_checkpointing a block runs again in the backward pass: torch.utils.checkpoint"
    expect_equal("forward passes of a block, and after backward", (once, len(calls)), (1, 2), remark=remark)
    plain(tokens, labels=tokens)[1].backward()
    for (name, one), other in zip(plain.named_parameters(), lean.parameters(), strict=True):
        grad = torch.zeros_like(one) if other.grad is None else other.grad
        expect_close(f"the gradient of {name} with checkpointing", grad, one.grad, atol=1e-6)
    lean.eval()
    calls.clear()
    lean(tokens, labels=tokens)[1].backward()
    expect_equal("forward passes of a block in eval()", len(calls), 1, remark="in eval() nothing is checkpointed")


CHECKS = {
    "rmsnorm": rmsnorm,
    "rotate_half": rotate_half,
    "rotary": rotary,
    "swiglu": swiglu,
    "attention": attention,
    "init_weights": init_weights,
    "gpt_forward": gpt_forward,
}
