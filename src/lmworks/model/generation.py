"""Generation with a KV cache: the same network, one new token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import ModelSpec, SpecError
from .attention import dense
from .gpt import GPT


class KVCache:
    """Keys and values of every layer, as an attention backend: it appends, then attends over all it holds."""

    def __init__(self, spec: ModelSpec, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        shape = (spec.layers, 2, batch, capacity, spec.kv_heads, spec.head_dim)
        self.store = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        end = self.length + q.shape[1]
        keys, values = self.store[layer]
        keys[:, self.length : end], values[:, self.length : end] = k, v
        attend = dense(self.spec, q.device, offset=self.length)
        return attend(q, keys[:, :end].type_as(q), values[:, :end].type_as(q), layer)

    def advance(self, tokens: int) -> None:
        """Called once all layers have written."""
        self.length += tokens


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked. temperature = 0 is greedy; top_k = 0 and top_p = 1 switch those off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise SpecError(f"temperature = {self.temperature:g} is out of range: it must be at least 0")
        if self.top_k < 0:
            raise SpecError(f"top-k = {self.top_k} is out of range: it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise SpecError(f"top-p = {self.top_p:g} is out of range: it must be more than 0 and at most 1")


def sample(logits: Tensor, how: Sampling, generator: torch.Generator | None) -> Tensor:
    """Next token of each row of logits (batch, vocab)."""
    if how.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / how.temperature
    if how.top_k and how.top_k < logits.shape[-1]:
        smallest = logits.topk(how.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if how.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)  # mass of likelier tokens
        ordered = ordered.masked_fill(before >= how.top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, index, ordered)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def stream(model: GPT, prompt: Tensor, max_tokens: int, how: Sampling) -> Iterator[Tensor]:
    """Yield the next token of each row, (batch), up to max_tokens times. Prompts are (batch, seq), one length."""
    limit = model.spec.context
    if prompt.shape[1] == 0:
        raise SpecError("the prompt is empty: give at least one token")
    if prompt.shape[1] + max_tokens > limit:
        raise SpecError(
            f"prompt ({prompt.shape[1]} tokens) + max tokens ({max_tokens}) exceed the model's context of {limit}; "
            f"at most {max(0, limit - prompt.shape[1])} new tokens fit"
        )
    device = prompt.device
    generator = torch.Generator(device=device).manual_seed(how.seed)
    cache = KVCache(model.spec, prompt.shape[0], prompt.shape[1] + max_tokens, device, model.embed.weight.dtype)
    fresh = prompt
    for _ in range(max_tokens):
        positions = torch.arange(cache.length, cache.length + fresh.shape[1], device=device)
        logits = model(fresh, positions=positions, attend=cache)
        cache.advance(fresh.shape[1])
        token = sample(logits[:, -1], how, generator)
        yield token
        fresh = token.unsqueeze(1)


def generate(
    model: GPT, prompt: Tensor, max_tokens: int, how: Sampling | None = None, stop: int | None = None
) -> Tensor:
    """Prompt and continuation, (batch, seq + new). Ends early once every row has produced `stop`."""
    rows = [prompt]
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for token in stream(model, prompt, max_tokens, how or Sampling(temperature=0)):
        rows.append(token.unsqueeze(1))
        done |= token == stop if stop is not None else False
        if bool(done.all()):
            break
    return torch.cat(rows, dim=1)
