"""A decoder-only transformer as Llama has it: RMSNorm, rotary positions, SwiGLU, no biases.

    python src/models/gpt.py

builds a small one, runs it forward and backward on random tokens, and prints the logits' shape and the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 50257
    max_seq_len: int = 1024
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    gradient_checkpointing: bool = False
    use_flash: bool = False  # PyTorch's fused attention; False: the plain branch of exercise 5


SIZES = {
    "tiny": GPTConfig(vocab_size=256, max_seq_len=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64),
    "small": GPTConfig(),  # 124M parameters: GPT-2 small's width and depth
    "medium": GPTConfig(num_layers=16),  # 152M: two ranks train it in 8 GiB
}


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of one, then each of its elements by a learned weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden_size) → the same shape."""
        # exercise rmsnorm(self, x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        # end rmsnorm


def rotary_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, (max_seq_len, head_dim): the halves of a head turn alike."""
    dim = config.hidden_size // config.num_heads
    frequency = config.rope_theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = torch.arange(config.max_seq_len).float()[:, None] * frequency  # (max_seq_len, dim / 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate_half(x: Tensor) -> Tensor:
    """[x1, x2] → [−x2, x1], where x1 and x2 are the halves of the last dimension."""
    # exercise rotate_half(x)
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((-x2, x1), dim=-1)
    # end rotate_half


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (batch, heads, seq, head_dim), each head turned by its position's angles (seq, head_dim)."""
    # exercise rotary(q, k, cos, sin)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    # end rotary


class MLP(nn.Module):
    """SwiGLU: two projections up, one of them gated by SiLU, and one down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # exercise swiglu(self, x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        # end swiglu


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.hidden_size // config.num_heads
        self.use_flash = config.use_flash
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        heads = (batch, seq, self.num_heads, self.head_dim)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos[:seq], sin[:seq])
        if self.use_flash:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # exercise attention(self, q, k, v) -> out
            seq = q.shape[-2]
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (batch, heads, seq, seq)
            future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
            out = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v
            # end attention
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, hidden))


class TransformerBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed.weight  # tied
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Called for every module: linear and embedding weights normal with `init_std`, biases zero."""
        # exercise init_weights(self, module)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.init_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        # end init_weights

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(batch, seq) → logits (batch, seq, vocab_size), and the mean loss of predicting the next token.

        `labels` are the tokens themselves, not shifted; −100 counts for nothing. While it trains and
        `config.gradient_checkpointing` is set, no activation within a block is kept.
        """
        # exercise gpt_forward(self, input_ids, labels)
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.config.gradient_checkpointing and self.training:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return logits, None
        predicted = logits[:, :-1].reshape(-1, self.config.vocab_size)
        return logits, F.cross_entropy(predicted.float(), labels[:, 1:].reshape(-1), ignore_index=-100)
        # end gpt_forward


def main() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["small"])
    tokens = torch.randint(0, model.config.vocab_size, (1, 64))
    logits, loss = model(tokens, labels=tokens)
    assert loss is not None
    loss.backward()
    print(f"parameters: {sum(parameter.numel() for parameter in model.parameters()):,}")
    print(f"logits: {tuple(logits.shape)}")
    print(f"loss: {loss.item():.3f}  (a model that knows nothing has ln {model.config.vocab_size} = "
          f"{math.log(model.config.vocab_size):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
