"""Generation with a KV cache: the same network, one new token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import ModelSpec, SpecError
from .attention import cached_backend, dense
from .gpt import GPT


class KVCache:
    """Keys and values of every layer, as an attention backend: it appends, then attends over all it holds."""

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device) -> None:
        self.spec = cached_backend(spec)
        self.capacity, self.device = capacity, device
        self.store: list[Tensor] = []  # keys and values, made by the first layer in the precision of attention
        self.length = 0
        self.attend = dense(self.spec, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, **per_head: Tensor) -> Tensor:
        if not self.store:
            shape = (self.spec.layers, q.shape[0], self.capacity)
            self.store = [torch.empty(*shape, *x.shape[2:], device=self.device, dtype=v.dtype) for x in (k, v)]
        end = self.length + q.shape[1]
        keys, values = (store[layer] for store in self.store)
        keys[:, self.length : end], values[:, self.length : end] = k, v
        return self.attend(q, keys[:, :end], values[:, :end], layer, **per_head)

    def advance(self, tokens: int) -> None:
        """Called once all layers have written."""
        self.length += tokens
        self.attend = dense(self.spec, self.device, offset=self.length)


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked. temperature = 0 is greedy; top_k = 0 and top_p = 1 switch those off.

    `vocab` is how many ids the tokenizer has (0: as many as the model); rows of the head beyond it are only padding.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise SpecError(f"temperature = {self.temperature:g} is out of range: it must be at least 0 and finite")
        if self.top_k < 0:
            raise SpecError(f"top-k = {self.top_k} is out of range: it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise SpecError(f"top-p = {self.top_p:g} is out of range: it must be more than 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"seed = {self.seed} is out of range: it must be at least 0 and less than 2**63")


def sample(logits: Tensor, how: Sampling, generator: torch.Generator | None) -> Tensor:
    """Next token of each row of logits (batch, vocab)."""
    logits = logits[:, : how.vocab or None]
    if how.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / how.temperature
    if how.top_k and how.top_k < logits.shape[-1]:
        smallest = logits.topk(how.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if how.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of likelier tokens
        ordered = ordered.masked_fill(before >= how.top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, index, ordered)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def stream(model: GPT, prompt: Tensor, max_tokens: int, how: Sampling) -> Iterator[Tensor]:
    """Yield the next token of each row, (batch), up to max_tokens times. Prompts are (batch, seq), one length."""
    limit = model.spec.context
    if prompt.shape[1] == 0:
        raise SpecError("the prompt is empty: give at least one token")
    if prompt.shape[1] >= limit:
        raise SpecError(f"the prompt has {prompt.shape[1]} tokens, and the model's context only {limit}; shorten it")
    if prompt.shape[1] + max_tokens > limit:
        raise SpecError(
            f"prompt ({prompt.shape[1]} tokens) + max tokens ({max_tokens}) exceed the model's context of {limit}; "
            f"at most {limit - prompt.shape[1]} new tokens fit"
        )
    original = model.spec.rope_scaling.original_context
    if model.spec.rope_scaling.type == "longrope" and prompt.shape[1] <= original < prompt.shape[1] + max_tokens:
        raise SpecError(
            f"model.rope_scaling.type = 'longrope' turns keys by other factors beyond {original} tokens, and those in "
            f"a KV cache stay as they were: at most {original - prompt.shape[1]} new tokens"
        )
    device = prompt.device
    generator = torch.Generator(device=device).manual_seed(how.seed)
    cache = KVCache(model.spec, prompt.shape[1] + max_tokens, device)
    fresh = prompt
    for _ in range(max_tokens):
        positions = torch.arange(cache.length, cache.length + fresh.shape[1], device=device)
        logits = model(fresh, positions=positions, attend=cache, only_last=True)
        cache.advance(fresh.shape[1])
        token = sample(logits[:, -1], how, generator)
        yield token
        fresh = token.unsqueeze(1)


def generate(
    model: GPT, prompt: Tensor, max_tokens: int, how: Sampling | None = None, stop: int | None = None
) -> Tensor:
    """Prompt and continuation, (batch, seq + new). A row that produced `stop` repeats it until all of them have."""
    rows = [prompt]
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for token in stream(model, prompt, max_tokens, how or Sampling(temperature=0)):
        if stop is not None:
            token = token.masked_fill(done, stop)
            done |= token == stop
        rows.append(token.unsqueeze(1))
        if stop is not None and bool(done.all()):
            break
    return torch.cat(rows, dim=1)
