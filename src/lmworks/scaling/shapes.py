"""Shapes of dense models, one for every few percent of size, with exact counts of parameters and FLOPs.

Llama's block (RMSNorm, rotary positions, SwiGLU, grouped-query attention) at proportions of published models: 64
to 136 units of width for a layer, heads of 128 (64 below a width of 1024), 8 KV heads from there on. The narrowest are
for ladders of minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..plan.flops import model_flops_per_token
from ..spec import ModelSpec

ASPECTS = (64, 136)  # width over layers
LARGE_EMBEDDING = 0.2  # of all parameters: from there on the head uses the embedding matrix
WIDTHS = (
    *(12, 16, 24, 32, 48),
    *range(64, 256, 32),
    *range(256, 1024, 64),
    *range(1024, 2048, 256),
    *range(2048, 8192, 512),
    *range(8192, 24577, 1024),
)
KV_HEADS = 8  # and heads in eights, so that tensor parallelism divides both


@dataclass(frozen=True)
class Shape:
    model: ModelSpec
    seq: int

    @cached_property
    def n(self) -> int:
        return self.model.params

    @cached_property
    def n_no_embed(self) -> int:
        """Without the look-up of tokens; a head of its own counts."""
        return self.model.params - self.model.embedding_params

    def size(self, convention: str) -> int:
        return self.n if convention == "total" else self.n_no_embed

    @cached_property
    def flops_per_token(self) -> float:
        """Of training, attention included."""
        return model_flops_per_token(self.model, self.seq)

    @property
    def aspect(self) -> float:
        return self.model.hidden / self.model.layers

    @property
    def text(self) -> str:
        model = self.model
        tied = ", tied embeddings" if model.tie_embeddings else ""
        return (
            f"{model.layers} layers × {model.hidden}, {model.heads} heads of {model.head_dim}, {model.kv_heads} KV, "
            f"MLP {model.ffn}, vocabulary {model.vocab}{tied}"
        )


@lru_cache(maxsize=8)
def family(vocab: int, seq: int, min_layers: int = 2) -> tuple[Shape, ...]:
    """Every shape, smallest first. More layers than the usual proportions have make the narrowest models deeper."""
    shapes = (Shape(model, seq) for width in WIDTHS for model in of_width(width, vocab, seq, min_layers))
    return tuple(sorted(shapes, key=lambda shape: shape.n))


def of_width(width: int, vocab: int, seq: int, min_layers: int) -> Iterator[ModelSpec]:
    large = width >= 1024
    head = 128 if large else 64 if width >= 256 else min(width, 24 if width % 32 else 32)
    heads = KV_HEADS * max(1, round(width / (KV_HEADS * head))) if large else width // head
    ffn = -(-8 * width // (3 * 256)) * 256 if large else -(-8 * width // (3 * 64)) * 64
    fewest, most = max(min_layers, round(width / ASPECTS[1])), max(min_layers, round(width / ASPECTS[0]))
    step = 1 if most < 12 else 2 if most < 48 else 4
    for layers in range(-(-fewest // step) * step, most + 1, step):
        keys = {"layers": layers, "hidden": width, "heads": heads, "ffn": ffn, "vocab": vocab, "context": seq}
        keys |= {"head_dim": head, "kv_heads": KV_HEADS if large else heads}
        block = 2 * width * head * (heads + keys["kv_heads"]) + 3 * width * ffn
        tied = 2 * vocab * width > LARGE_EMBEDDING * (layers * block + 2 * vocab * width)
        theta = 500_000.0 if seq > 4096 else 10_000.0
        yield ModelSpec.from_dict({**keys, "tie_embeddings": tied, "rope_theta": theta})
