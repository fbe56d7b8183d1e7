"""The layouts whose collectives docs/parallelism.md shows, each with its formulas in the symbols of that page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmworks.spec import RunSpec

DENSE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 320, "context": 64}
MOE = {**DENSE, "experts": 4, "top_k": 2, "expert_ffn": 48}


@dataclass(frozen=True)
class Case:
    """`rows`: (kind, group, what travels, calls, bytes); the last two are formulas in the symbols of the page."""

    name: str
    parallel: dict[str, Any]
    rows: tuple[tuple[str, str, str, str, str], ...]
    model: tuple[tuple[str, Any], ...] = tuple(DENSE.items())
    precision: tuple[tuple[str, Any], ...] = ()

    def spec(self) -> RunSpec:
        return RunSpec.from_dict(
            {
                "name": self.name,
                "model": dict(self.model),
                "data": {"seq": 64, "micro_batch": 1, "global_batch": 8},
                "parallel": self.parallel,
                "precision": dict(self.precision),
                "cluster": {"device": "cpu"},
            }
        )


def sharded(group: str) -> tuple[tuple[str, str, str, str, str], ...]:
    return (
        ("all-gather", group, "weights", "m·(2·L+1)", "m·4·(ψ+ψ_b)"),
        ("reduce-scatter", group, "gradients", "L+1", "4·ψ"),
    )


CASES = [
    Case("ddp", {"dp": 2}, (("all-reduce", "dp_replicate", "gradients", "1", "4·ψ"),)),
    Case("fsdp1", {"dp": 2, "strategy": "fsdp1"}, sharded("dp_shard")),
    Case("fsdp2", {"dp": 2, "strategy": "fsdp2"}, sharded("dp_shard")),
    Case(
        "fsdp2-no-reshard",
        {"dp": 2, "strategy": "fsdp2", "reshard": False},
        (
            ("all-gather", "dp_shard", "weights", "m·(L+1)", "m·4·ψ"),
            ("reduce-scatter", "dp_shard", "gradients", "L+1", "4·ψ"),
        ),
    ),
    Case(
        "hsdp",
        {"dp_replicate": 2, "dp_shard": 2, "strategy": "fsdp2"},
        (*sharded("shard"), ("all-reduce", "dp_replicate", "shards of gradients", "L+1", "4·ψ/n_shard")),
    ),
    Case(
        "zero-1",
        {"dp": 2, "strategy": "zero", "zero": 1},
        (
            ("reduce-scatter", "dp_shard", "gradients", "1", "4·ψ"),
            ("all-gather", "dp_shard", "updated weights", "1", "4·ψ"),
        ),
    ),
    Case(
        "zero-2",
        {"dp": 2, "strategy": "zero", "zero": 2},
        (
            ("reduce-scatter", "dp_shard", "gradients", "m", "m·4·ψ"),
            ("all-gather", "dp_shard", "updated weights", "1", "4·ψ"),
        ),
    ),
    Case(
        "tensor",
        {"tp": 2},
        (
            ("all-reduce", "tp", "hidden states and their gradients", "m·(4·L+2)", "m·(4·L+2)·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m", "m·t·2·4·b·s"),
        ),
    ),
    Case(
        "sequence",
        {"tp": 2, "sp": True},
        (
            ("all-gather", "tp", "hidden states; two numbers a token", "m·(4·L+3)", "m·((4·L+2)·4·b·s·h + t·2·4·b·s)"),
            ("reduce-scatter", "tp", "hidden states", "m·(4·L+2)", "m·(4·L+2)·4·b·s·h"),
            ("all-reduce", "tp", "gradients of the norms", "1", "4·(2·L+1)·h"),
        ),
    ),
    Case(
        "ring",
        {"cp": 2},
        (
            ("send", "cp", "keys and values, twice; their gradients", "m·L·3·(c-1)", "m·L·3·(c-1)·2·4·b·(s/c)·kv"),
            ("all-reduce", "cp", "gradients (DDP over dp × cp)", "1", "4·ψ"),
        ),
    ),
    Case(
        "ulysses",
        {"cp": 2, "cp_method": "ulysses"},
        (
            ("all-to-all", "cp", "queries, keys, values; outputs", "m·L·4", "m·L·2·4·b·(s/c)·(2·q+2·kv)"),
            ("all-reduce", "cp", "gradients (DDP over dp × cp)", "1", "4·ψ"),
        ),
    ),
    Case(
        "1f1b",
        {"pp": 2, "schedule": "1f1b"},
        (("send", "pp", "hidden states; their gradients", "2·m·(p-1)/p", "2·m·(p-1)/p·4·b·s·h"),),
    ),
    Case(
        "interleaved",
        {"pp": 2, "schedule": "interleaved"},
        (("send", "pp", "hidden states; their gradients", "2·m·(p·v-1)/p", "2·m·(p·v-1)/p·4·b·s·h"),),
    ),
    Case(
        "zbv",
        {"pp": 2, "schedule": "zbv"},
        (("send", "pp", "hidden states; their gradients", "2·m·(2·p-2)/p", "2·m·(2·p-2)/p·4·b·s·h"),),
    ),
    Case(
        "expert",
        {"dp": 4, "ep": 2},
        (
            ("all-to-all", "ep", "tokens there and back; counts", "m·L·5", "m·L·(4·4·b·s·k·h + 8·E)"),
            ("all-reduce", "edp", "gradients of experts", "1", "4·ψ_e/n_ep"),
            ("all-reduce", "dp_replicate", "other gradients; visits of experts", "2", "4·(ψ-ψ_e) + 8·L·E"),
        ),
        tuple(MOE.items()),
    ),
    Case(
        "recompute",
        {"tp": 2, "recompute": "full"},
        (
            ("all-reduce", "tp", "hidden states and their gradients", "m·(5·L+2)", "m·(5·L+2)·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m", "m·t·2·4·b·s"),
        ),
    ),
    Case("recompute-fsdp2", {"dp": 2, "strategy": "fsdp2", "recompute": "full"}, sharded("dp_shard")),
    Case(
        "reduce-bf16",
        {"dp": 2},
        (("all-reduce", "dp_replicate", "gradients", "1", "2·ψ"),),
        precision=(("reduce", "bf16"),),
    ),
    Case(
        "product",
        {"pp": 2, "dp": 2, "tp": 2, "strategy": "fsdp2"},
        (
            ("all-gather", "shard", "weights", "(m+1)·L/p + 1", "4·(m·ψ_bt + ψ_t)/p"),
            ("reduce-scatter", "shard", "gradients", "L/p + 1", "4·ψ_t/p"),
            ("all-reduce", "tp", "hidden states and their gradients", "m·(4·L+2)/p", "m·(4·L+2)/p·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m/p", "m/p·t·2·4·b·s"),
            ("send", "pp", "hidden states; their gradients", "2·m·(p-1)/p", "2·m·(p-1)/p·4·b·s·h"),
        ),
    ),
]


def symbols(spec: RunSpec) -> dict[str, float]:
    model, layout = spec.model, spec.parallel
    experts = model.layers * model.routed_params
    inner, outer = (
        2 * model.layers * model.norm_params,
        model.norm_params,
    )  # norms, which tensor parallelism leaves whole
    cut = (model.params - model.layers * model.block_params - outer) / layout.tp + outer
    blocks = (model.layers * model.block_params - inner) / layout.tp + inner
    return {
        "ψ": model.params, "ψ_b": model.layers * model.block_params, "ψ_e": experts,
        "ψ_t": cut + blocks, "ψ_bt": blocks,
        "L": model.layers, "h": model.hidden, "q": model.q_dim, "kv": model.kv_dim,
        "E": model.experts, "k": model.top_k,
        "s": spec.data.seq, "b": spec.data.micro_batch, "m": spec.accumulation,
        "p": layout.pp, "v": layout.virtual_stages, "t": layout.tp, "c": layout.cp,
        "n_shard": layout.dp_shard, "n_ep": layout.ep,
    }  # fmt: skip


def value(formula: str, known: dict[str, float]) -> float:
    return float(eval(formula.replace("·", "*"), {"__builtins__": {}}, dict(known)))
