"""Where the memory goes: the states of a model in training, and the KV cache of one that answers.

    python src/memory/budget.py

prints both for a model of 30 billion parameters.
"""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

# Bytes of one parameter. bf16 training keeps an fp32 copy of the weights beside Adam's two moments: 4 + 4 + 4.
BYTES = {
    "fp32": {"weights": 4, "gradients": 4, "optimizer": 8},
    "bf16": {"weights": 2, "gradients": 2, "optimizer": 12},
}


def model_states(parameters: int, ranks: int, stage: int, precision: str = "bf16") -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on the rank that has most, under a stage of ZeRO (0: plain DDP).

    What is sharded is cut into `ranks` equal parts, and the last part is filled up where they do not divide it.
    """
    # exercise model_states(parameters, ranks, stage, precision)
    share = -(-parameters // ranks)
    sharded_from = {"weights": 3, "gradients": 2, "optimizer": 1}
    return {
        kind: size * (share if stage >= sharded_from[kind] else parameters) for kind, size in BYTES[precision].items()
    }
    # end model_states


def kv_cache_bytes(
    layers: int, heads: int, kv_heads: int, hidden: int, lengths: list[int], number: int = 2, block: int = 16
) -> int:
    """Bytes of the KV cache of sequences of these lengths, in whole blocks of `block` tokens. `number`: its bytes."""
    # exercise kv_cache_bytes(layers, heads, kv_heads, hidden, lengths, number, block)
    head_dim = hidden // heads
    token = 2 * layers * kv_heads * head_dim * number  # a key and a value in every layer
    blocks = sum(-(-length // block) for length in lengths)
    return blocks * block * token
    # end kv_cache_bytes


def cheapest_stage(parameters: int, ranks: int, memory: int, activations: int, precision: str = "bf16") -> int | None:
    """The lowest stage of ZeRO whose states fit beside the activations; None where not even stage 3 does."""
    # exercise cheapest_stage(parameters, ranks, memory, activations, precision)
    for stage in range(4):
        if sum(model_states(parameters, ranks, stage, precision).values()) + activations <= memory:
            return stage
    return None
    # end cheapest_stage


def main() -> None:
    parameters, ranks = 30_000_000_000, 64
    print(f"{parameters:,} parameters in bf16 with Adam, {ranks} ranks: GB on a rank")
    for stage in range(4):
        found = {kind: size / 1e9 for kind, size in model_states(parameters, ranks, stage).items()}
        print(f"  ZeRO-{stage}  " + "  ".join(f"{kind} {size:6.2f}" for kind, size in found.items()))
    for kv_heads in (56, 8):
        size = kv_cache_bytes(60, 56, kv_heads, 7168, [4096] * 32)
        print(f"KV cache of 32 sequences of 4,096 tokens, {kv_heads} KV heads: {size / 1e9:.1f} GB")
    stage = cheapest_stage(parameters, ranks, 80 * 10**9, 20 * 10**9)
    print(f"beside 20 GB of activations it fits into 80 GB from ZeRO-{stage} on")


if __name__ == "__main__":
    main()
