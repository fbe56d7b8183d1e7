"""Reference configurations: the layout that the search finds for well-known sizes, as specs and as a page.

    python benchmarks/reference_configs.py          # writes configs/reference/*.toml and docs/reference.md

Every figure on the page is a prediction; `lmworks plan validate` says how good such predictions are.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmworks.plan.cluster_request import ClusterRequest, run_on_cluster
from lmworks.plan.search.candidates import OFFLOAD_GIB, SearchProblem, problem_of
from lmworks.plan.search.search import Found, search
from lmworks.spec import ModelSpec, ParallelSpec, RunSpec, SpecError
from lmworks.spec.load import dump_toml
from lmworks.spec.schema import Section

ROOT = Path(__file__).parent.parent
GPUS = {"a100": "A100 80 GB", "h100": "H100", "b200": "B200", "tpu-v5p": "TPU v5p"}
TOKENS = 1e12
WORTH_OFFLOAD = 1.25  # how much longer a step without optimizer offload may take
TRILLION = [  # a mixture of experts of about 10¹² weights, of which a token meets 3 %
    "model.layers=64",
    "model.hidden=7168",
    "model.heads=64",
    "model.kv_heads=8",
    "model.head_dim=128",
    "model.ffn=18432",
    "model.vocab=131072",
    "model.context=8192",
    "model.experts=256",
    "model.top_k=8",
    "model.shared_experts=1",
    "model.expert_ffn=2816",
]


@dataclass(frozen=True)
class Reference:
    name: str
    model: str
    gpus: int
    seq: int
    batch: int  # sequences of a step
    changes: tuple[str, ...] = ()


REFERENCES = [
    Reference("7b-8", "mistral-7b", 8, 4096, 256),
    *(Reference(f"70b-{gpus}", "llama3-70b", gpus, 8192, 1024) for gpus in (64, 128, 256)),
    *(Reference(f"405b-{gpus}", "llama3-405b", gpus, 8192, 2048) for gpus in (512, 1024, 2048)),
    Reference("moe-1t-4096", "tiny", 4096, 8192, 8192, tuple(TRILLION)),
]
SCALING = (1, 8, 64, 512, 1024)
PER_GPU = 4  # sequences of a step, in the scaling curve
SIZES = ("parameters", "gradients", "optimizer", "activations")
COLUMNS = ("GPU", "layout", *SIZES, "rest", "reserved", "step", "MFU", "days", "$")
WORK = {"matmul", "attention", "norms", "residual", "rotary", "activation", "embedding", "loss", "experts"}
HEAD = """# Reference configurations

What the search finds for well-known sizes, made by `python benchmarks/reference_configs.py`. Every figure is a
prediction ([validation](validation.md) says how good they are); times are for our own trainer with compiled blocks in
bf16, fp32 weights and AdamW. Each line but the TPU's is a spec: `configs/reference/NAME-GPUS-GPU.toml`. TPUs are by
formula: our trainer does not run there. Optimizer states go to host memory (`offload`) only where nothing fits without
it or a step is a quarter longer; `lmworks plan search` tries that everywhere, and activations in host memory too, and
may find a faster layout on machines that have the memory.

```sh
lmworks plan configs/reference/70b-256-h100.toml
lmworks train configs/reference/7b-8-h100.toml data.path=YOUR-TOKENS
```

Memory is of the fullest rank, in GiB. With ψ weights on a rank, after pipeline and tensor parallelism, parameters take
4ψ bytes, gradients 4ψ, AdamW's moments 8ψ; ZeRO-1 divides the moments by the data-parallel ranks, ZeRO-2 the gradients
too, ZeRO-3 all three; gradients are those that are there at the highest moment. Days and dollars are for 10¹² tokens
with the failures of a cluster of that size, at the catalogue's prices; set your own with `cluster.price_hour`.
"""


def ask(reference: Reference, gpu: str) -> tuple[RunSpec, SearchProblem]:
    request = ClusterRequest(seq=reference.seq, micro_batch=1, global_batch=reference.batch, dtype="bf16")
    base = run_on_cluster(
        reference.model, [*reference.changes, f"name={reference.name}-{gpu}", "data.path=my-tokens"], request
    )
    return base, problem_of(base, f"{reference.gpus}x{gpu}")


def find(reference: Reference, gpu: str) -> tuple[RunSpec, Found] | str:
    """The fastest layout that needs no host memory, or only for optimizer states where that is worth it."""
    try:
        base, question = ask(reference, gpu)
        fronts = [
            search([replace(question, pinned=pinned)]).front
            for pinned in ({"offload": "none", OFFLOAD_GIB: 0.0}, {OFFLOAD_GIB: 0.0})
        ]
        found = [front[0] for front in fronts if front] or search([question]).front[:1]
    except SpecError as error:
        return str(error)
    if found:
        return base, found[0] if found[0].step_s < WORTH_OFFLOAD * found[-1].step_s else found[-1]
    return "nothing fits"


def write_specs(found: dict[tuple[str, str], Any]) -> None:
    folder = ROOT / "configs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for (name, gpu), answer in found.items():
        if isinstance(answer, str) or gpu.startswith("tpu"):
            continue
        base, layout = answer
        text = f"# {layout.problem.world} × {layout.problem.gpu.name}: {layout.case.text}\n"
        spec = layout.spec(base)
        data = {key: getattr(spec.data, key) for key in ("path", "seq", "micro_batch", "global_batch")}
        machines = {key: getattr(spec.cluster, key) for key in ("gpu", "nodes", "gpus_per_node")}
        kept = {"name": spec.name, "model": shape(spec.model), "data": data}
        kept |= {
            "parallel": changed(spec.parallel, ParallelSpec()),
            "precision": {"dtype": "bf16"},
            "cluster": machines,
        }
        (folder / f"{name}-{gpu}.toml").write_text(text + dump_toml(kept))


def shape(model: ModelSpec) -> dict[str, Any]:
    """By name, and what differs from that."""
    usual = ModelSpec.from_preset(model.preset) if model.preset != "tiny" else ModelSpec()
    named = {"preset": model.preset} if model.preset != "tiny" else {}
    return named | changed(model, usual, without="preset")


def changed(section: Section, usual: Section, without: str = "") -> dict[str, Any]:
    now, before = section.to_dict(), usual.to_dict()
    return {key: value for key, value in now.items() if value != before.get(key) and key != without}


def page(found: dict[tuple[str, str], Any], curve: list[tuple[int, Found]]) -> str:
    lines = [HEAD]
    for reference in REFERENCES:
        base, _ = ask(reference, "h100")
        title = reference.name.rsplit("-", 1)[0].upper()
        lines += [
            f"## {title} on {reference.gpus}",
            "",
            f"{base.model.params / 1e9:,.1f} × 10⁹ weights, sequences of {reference.seq}, {reference.batch} a step.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        lines += [line(GPUS[gpu], found[reference.name, gpu]) for gpu in GPUS] + [""]
    return "\n".join([*lines, scaling_text(curve)])


def line(gpu: str, answer: Any) -> str:
    if isinstance(answer, str):
        return f"| {gpu} | {answer} |" + " |" * 10
    _, layout = answer
    memory, price = layout.budget.to_dict(), layout.price
    assert price is not None, "the first of the front is priced again"
    sizes = [memory[name] - (memory["absent"] if name == "gradients" else 0) for name in SIZES]
    sizes += [memory["allocated"] - sum(sizes), memory["reserved"]]
    bill = layout.bill(TOKENS)
    cells = [gpu, layout.case.text, *(f"{size / 2**30:.1f}" for size in sizes)]
    cells += [f"{layout.step_s:.3g} s", f"{float(price.mfu):.1%}", f"{bill.hours / 24:,.0f}"]
    return "| " + " | ".join([*cells, f"{bill.dollars / 1e6:,.2f}M"]) + " |"


def scaling() -> list[tuple[int, Found]]:
    points = []
    for gpus in SCALING:
        answer = find(Reference(f"scaling-{gpus}", "llama3-8b", gpus, 8192, PER_GPU * gpus), "h100")
        if not isinstance(answer, str):
            points.append((gpus, answer[1]))
    return points


def scaling_text(curve: list[tuple[int, Found]]) -> str:
    lines = [
        "## From one GPU to 1,024",
        "",
        f"Llama 3 8B on H100s, sequences of 8192, {PER_GPU} a step for each GPU (weak scaling); the fastest layouts.",
        "",
        "| GPUs | layout | tokens/s a GPU | of the best | MFU | what limits it: largest parts beside computing |",
        "|---|---|---|---|---|---|",
    ]
    best = max(found.tokens_per_s / gpus for gpus, found in curve)
    for gpus, found in curve:
        price = found.price
        assert price is not None
        others = sorted(((float(s), n) for n, s in price.parts.items() if n not in WORK), reverse=True)[:3]
        limits = ", ".join(f"{name} {seconds / found.step_s:.1%}" for seconds, name in others if seconds > 0)
        each = found.tokens_per_s / gpus
        lines.append(
            f"| {gpus} | {found.case.text} | {each:,.0f} | {each / best:.0%} | {float(price.mfu):.1%} | {limits} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    asked = [(one, gpu) for one in REFERENCES for gpu in GPUS]
    with ProcessPoolExecutor() as pool:
        answers = pool.map(find, *zip(*asked, strict=True))
    found = {(one.name, gpu): answer for (one, gpu), answer in zip(asked, answers, strict=True)}
    write_specs(found)
    (ROOT / "docs" / "reference.md").write_text(page(found, scaling()))


if __name__ == "__main__":
    main()
