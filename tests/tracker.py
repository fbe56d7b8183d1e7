"""A tracker of live tensor storages, from allocation to release."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmworks.model import GPT
from lmworks.model.gpt import Linear
from lmworks.model.lora import add_adapters, init_adapters
from lmworks.model.quantized_weight import quantize_base
from lmworks.parallel.precision import cast_weights
from lmworks.spec import RunSpec
from lmworks.spec.lora import LoraSpec


class Tracker(TorchDispatchMode):
    """Live and peak bytes of storages made inside it; what was there before is not counted."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.follow(tensor.untyped_storage())
        return out

    def follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


class Steps:
    """A training loop over one batch, as the trainer's."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.model = GPT(spec.model)
        if spec.adapters:
            adapt(self.model, spec.lora, spec.adapters)
        cast_weights(spec.precision, self.model)
        self.model.recompute = spec.parallel.recompute
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], fused=True)
        shape = (spec.data.micro_batch, spec.data.seq)
        self.tokens = torch.randint(0, spec.model.vocab, shape, generator=torch.Generator().manual_seed(0))
        self.documents = torch.zeros_like(self.tokens) if spec.data.document_mask else None

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.precision.dtype == "bf16"):
            return self.model(self.tokens, self.tokens, documents=self.documents, reduction="sum", keep_logits=False)[1]

    def step(self) -> None:
        for _ in range(self.spec.accumulation):
            (self.forward() / self.spec.tokens_per_step).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def track(self) -> Tracker:
        held = [self.tokens, *self.model.parameters()] + ([] if self.documents is None else [self.documents])
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return Tracker(*held, *states)


def adapt(model: GPT, lora: LoraSpec, names: tuple[str, ...]) -> None:
    add_adapters(model, lora, names)
    init_adapters(model, 0)
    if lora.base:
        kept = {name: module.weight for name, module in model.named_modules() if isinstance(module, Linear)}
        quantize_base(model, lora.base)
        for name, module in model.named_modules():
            if isinstance(module, Linear) and module.quantized is not None:
                module.quantized.store(kept[name])


def make_run(
    *, micro_batch: int = 2, seq: int = 32, dtype: str = "fp32", weights: str = "fp32", recompute: str = "none",
    accumulation: int = 1, documents: bool = False, lora: Mapping[str, Any] | None = None, **model: Any,
) -> RunSpec:  # fmt: skip
    shape = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 96, "context": max(32, seq), **model}
    data = {"seq": seq, "micro_batch": micro_batch, "global_batch": micro_batch * accumulation}
    return RunSpec.from_dict(
        {
            "model": shape,
            "data": {**data, "document_mask": documents},
            "precision": {"dtype": dtype, "weights": weights},
            "parallel": {"recompute": recompute},
            "lora": dict(lora or {}),
        }
    )
