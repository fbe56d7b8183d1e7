"""One dial, `--dial depth=N`: width, heads, batch, tokens, learning rate and weight decay follow from depth by rule.

    shape           layers = N, hidden = 64·N, heads of 64, as many key heads          nanochat's aspect ratio
    D, tokens       20 × the weights a token is multiplied with (blocks and head)      Chinchilla, arXiv:2203.15556
    B, batch        2¹⁹ tokens × (D / D₁₂)^0.383, a power of two of sequences          Power Lines, arXiv:2505.13738
    learning rate   6e-4 × √(B / 2¹⁹), carried to width and depth by μP                GPT-3 125M, arXiv:2005.14165
    weight decay    0.1 × √(B / 2¹⁹) × D₁₂ / D: the timescale B / (η·λ·D) stays        arXiv:2405.13698

D₁₂ are the tokens of depth 12, the reference, which has the shape of GPT-3's smallest model and its batch and rate. The
rules for batch, rate and decay are those that nanochat combines. All else (data, sequence length, vocabulary, schedule,
precision, layout) is the spec's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .errors import SpecError
from .load import load_run
from .model import ModelSpec
from .run import RunSpec

ASPECT, HEAD_DIM = 64, 64  # hidden / layers; width of a head
REFERENCE = 12  # the depth at which the numbers below were tuned
BATCH, LR, DECAY = 2**19, 6e-4, 0.1  # of the reference; the batch in tokens
TOKENS_PER_WEIGHT = 20
BATCH_EXPONENT = 0.383
DEEPEST = 512


def parse_dial(text: str) -> int:
    """The depth of `depth=N`."""
    key, _, value = text.partition("=")
    if key.strip() != "depth" or not value.strip().isdecimal() or not 1 <= int(value) <= DEEPEST:
        raise SpecError(f"--dial {text}: the dial is depth=N with N from 1 to {DEEPEST}, e.g. --dial depth=12")
    return int(value)


def dial_overrides(source: str | Path, overrides: Sequence[str], dial: str) -> list[str]:
    """`overrides` behind what the dial says, so that they win; batch and tokens follow from the shape they leave."""
    if not dial:
        return list(overrides)
    shape = shape_keys(parse_dial(dial))
    batch = [one for one in overrides if one.partition("=")[0].strip() == "data.global_batch"]
    others = [one for one in overrides if one not in batch]
    run = load_run(source, [*shape, *others, "data.global_batch=0"])
    value = batch[-1].partition("=")[2].strip() if batch else ""
    return [*shape, *training_keys(run, int(value) if value.isdecimal() else 0), *overrides]


def shape_keys(depth: int) -> list[str]:
    values = {
        "layers": depth,
        "hidden": ASPECT * depth,
        "heads": ASPECT * depth // HEAD_DIM,
        "kv_heads": 0,
        "head_dim": HEAD_DIM,
        "ffn": 0,
        "parametrization": "mup",
        "mup_base_hidden": ASPECT * REFERENCE,
        "mup_base_layers": REFERENCE,
    }
    return [f"model.{key}={value}" for key, value in values.items()]


def training_keys(run: RunSpec, sequences: int) -> list[str]:
    """Batch, steps, learning rate and decay for a model that has its shape; `sequences` of a batch (0: by rule)."""
    tokens, reference = tokens_of(run.model), tokens_of(at_depth(run.model, REFERENCE))
    seq, dp = run.data.seq, run.parallel.dp
    if not sequences:
        wanted = BATCH * (tokens / reference) ** BATCH_EXPONENT
        sequences = max(2 ** round(math.log2(wanted / seq)), 1)
        sequences = -(-sequences // dp) * dp  # as many for each rank
    batch = sequences * seq
    rate = math.sqrt(batch / BATCH)
    values = {
        "data.global_batch": sequences,
        "data.micro_batch": math.gcd(run.data.micro_batch, sequences // dp),
        "optim.steps": max(1, round(tokens / batch)),
        "optim.lr": float(f"{LR * rate:.4g}"),
        "optim.weight_decay": float(f"{DECAY * rate * reference / tokens:.4g}"),
    }
    return [f"{key}={value}" for key, value in values.items()]


def at_depth(model: ModelSpec, depth: int) -> ModelSpec:
    """The model of the same family; keys of the shape that were given beside the dial are the dial's again."""
    keys = {"layers": depth, "hidden": ASPECT * depth, "heads": ASPECT * depth // HEAD_DIM, "head_dim": HEAD_DIM}
    return model.replace(**keys, kv_heads=0, ffn=0)


def tokens_of(model: ModelSpec) -> int:
    return TOKENS_PER_WEIGHT * model.matmul_params
