"""The report of `lmworks bench ddp-fsdp`: markdown with text charts, and HTML with SVG charts."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from ..plan.exact.shards import weights
from ..record.formatting import binary_bytes, short
from ..report.html_page import Section, sections_as_markdown, sections_as_page, write_report_files
from ..report.svg import Bars
from .data_parallel import Outcome, Study

TITLE = "DDP, FSDP and ZeRO on the same model"


def write_reports(study: Study, folder: Path) -> tuple[Path, Path]:
    return write_report_files(folder, as_markdown(study), as_page(study))


def sections(study: Study) -> list[Section]:
    found = [overview(study), resident_bytes(study), formats(study), peak_memory(study), collectives_section(study)]
    return [*found, rank_failures(study)] if any(outcome.job for outcome in study.outcomes) else found


def lead(study: Study) -> str:
    spec = study.spec
    return (
        f"{spec.model.params:,} parameters ({spec.model.layers} layers, hidden {spec.model.hidden}"
        f"{', tied embeddings' if spec.model.tie_embeddings else ''}), sequences of {spec.data.seq}, "
        f"{spec.data.micro_batch} a micro-batch, {spec.precision.dtype}, {spec.optim.optimizer}, "
        f"{study.ranks} ranks on one machine: {study.machine}."
    )


def overview(study: Study) -> Section:
    columns, rows = overview_table(study)
    text = (
        f"Steps of the strategies were interleaved in {study.rounds} rounds after a warm-up; tokens/s follows from the "
        "median step. Other load on the machine changes all times given here. The ratio to DDP is the median over "
        "rounds, of steps in the same round, and is the figure to compare. State is what rank 0 holds just before the "
        "update, peak the largest sum of tensors on any rank. Bytes sent are message sizes. Start is from the command "
        "to the beginning of its first step."
    )
    bars = Bars(
        "Speed, ratio of tokens/s to DDP's",
        [one.name for one in study.outcomes],
        ["ratio"],
        [[one.ratio] for one in study.outcomes],
        lambda value: f"{value:.2f}",
    )
    return Section("Overview", text, columns, rows, bars, len(columns) - 1)


def overview_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Also printed by the command."""
    jobs = any(one.job for one in study.outcomes)
    columns = ["strategy", "tokens/s", "to DDP", "state", "peak", "sent a step", "calls", "as worked out"]
    rows = []
    for one in study.outcomes:
        calls, size = (sum(column) for column in zip(*one.counted.values(), strict=True))
        row = [one.name, short(one.tokens_per_s), f"{one.ratio:.2f}×", binary_bytes(one.held[0].total)]
        row += [binary_bytes(max(one.peak)), binary_bytes(size), f"{calls}"]
        row.append({True: "yes", False: "NO", None: "no formula"}[one.exact])
        if one.job:
            row += [f"{one.job.start_s:.1f} s", binary_bytes(one.job.checkpoint_bytes)]
        rows.append(row)
    columns += ["start", "checkpoint"] * jobs
    rows += [[name, why, *[""] * (len(columns) - 2)] for name, why in study.missing.items()]
    return columns, rows


def resident_bytes(study: Study) -> Section:
    text = (
        "Bytes of live tensors on each rank just before the update, each storage counted once, and by formula; the two "
        "must be equal to the byte. ZeRO and FSDP2 shard every weight by rows as torch.chunk does, "
        f"⌈rows/{study.ranks}⌉ to a rank{uneven(study)}; FSDP2 allocates that much on every rank, and rows that do not "
        "exist are padding. FSDP1 shards one flat parameter a block, in which weights begin at multiples of 16 bytes, "
        "and which is padded to a multiple of the ranks. Adam's states are two fp32 moments, and 4 bytes a weight "
        "that count its steps. The fp32 parameters are the master weights: only DeepSpeed holds a second copy."
    )
    columns = ["strategy", "rank", "equal"]
    columns += ["parameters", "gradients", "master", "optimizer", "padding of parameters", "of gradients", "arithmetic"]
    rows = []
    for one in study.outcomes:
        for rank, held in enumerate(one.held):
            sizes = [held.parameters, held.gradients, held.master, held.optimizer]
            sizes += [held.parameter_padding, held.gradient_padding]
            want = one.worked_out[rank] if one.worked_out else None
            same = "no formula" if want is None else "yes" if want == held else "NO"
            rows.append(
                [one.name, f"{rank}", same, *(f"{size:,}" for size in sizes), f"{want.total:,}" if want else "–"]
            )
    bars = Bars(
        "State of rank 0 before the update",
        [one.name for one in study.outcomes],
        ["parameters", "gradients", "optimizer", "master", "padding"],
        [
            [held.parameters, held.gradients, held.optimizer, held.master, held.padding]
            for held in (one.held[0] for one in study.outcomes)
        ],
        binary_bytes,
    )
    return Section("Resident memory of a rank", text, columns, rows, bars, 7)


def uneven(study: Study) -> str:
    left = [weight.name for weight in weights(study.spec.model) if weight.shape[0] % study.ranks]
    if not left:
        return " (here all rows divide)"
    named = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    return f" (rows of {named} do not divide: the last rank has fewer)"


def formats(study: Study) -> Section:
    """Number formats of resident and of transient tensors."""
    compute, reduce = study.spec.precision.dtype, study.spec.precision.reduce
    text = (
        "Gradients exist from the backward pass to the update, and are dropped after it; what is left of them between "
        "two steps was read from live storages: DDP keeps its buckets (gradients are views of them), FSDP1 the flat "
        "gradient. Transient is what lives for a part of a step only."
    )
    rows = []
    for one in study.outcomes:
        resident = f"parameters {one.dtypes['parameters']}, gradients {one.dtypes['gradients']}, states "
        rows.append([one.name, resident + one.dtypes["optimizer"], transient(one, compute, reduce)])
        rows[-1].append(binary_bytes(one.gradients_after))
    return Section(
        "Resident and transient", text, ["strategy", "resident", "transient", "gradients between steps"], rows, None, 1
    )


def transient(one: Outcome, compute: str, reduce: str) -> str:
    casts = "" if compute == "fp32" else f"{compute} casts of weights by autocast; "
    if one.name.startswith("DeepSpeed"):
        return "its own buckets" if compute == "fp32" else f"its own buckets; weights are resident in {compute}"
    if "FSDP" in one.name or one.name == "ZeRO-3":
        inside = "" if compute == "fp32" else f" ({compute} in blocks, fp32 outside)"
        return f"gathered weights{inside}; whole gradients of the block at work; messages of them in {reduce}"
    sent = f"buckets of gradients in {reduce} on their way"
    return f"{casts}{'gradients while they accumulate' if one.name == 'DDP' else sent}"


def peak_memory(study: Study) -> Section:
    text = (
        "The most that a rank's tensors held at one moment of a step, followed storage by storage, and what the state "
        "above, activations of the same micro-batch on one rank, gathered weights and messages on their way add up to. "
        "On a CPU, gloo's own copies of what it reduces are among them."
    )
    rows = []
    for one in study.outcomes:
        for rank, size in enumerate(one.peak):
            expected = one.peak_worked_out[rank] if one.peak_worked_out else None
            off = f"{size / expected.tensors - 1:+.1%}" if expected else "–"
            rows.append([one.name, f"{rank}", expected.moment if expected else "no formula"])
            rows[-1] += [f"{size:,}", f"{expected.tensors:,}" if expected else "–", off]
    bars = Bars(
        "Peak of rank 0",
        [one.name for one in study.outcomes],
        ["bytes"],
        [[one.peak[0]] for one in study.outcomes],
        binary_bytes,
        [one.peak_worked_out[0].tensors if one.peak_worked_out else None for one in study.outcomes],
        "by formula",
    )
    columns = ["strategy", "rank", "highest moment by formula", "measured", "formula", "measured against it"]
    return Section("Peak memory", text, columns, rows, bars, 3)


def collectives_section(study: Study) -> Section:
    text = (
        "Collectives of one step as they were called, beside the formula; bytes are message sizes (all-reduce: the "
        "tensor; all-gather and reduce-scatter: the whole). Of n ranks in a ring, a link carries 2·(n − 1)/n of an "
        "all-reduce and half of that of the others. Every strategy has one small all-reduce of the step's figures."
    )
    rows = []
    for one in study.outcomes:
        for kind in sorted({*one.counted, *one.formula}):
            count, size = one.counted.get(kind, (0, 0))
            want = one.formula.get(kind)
            row = [one.name, kind, "no formula" if not one.formula else "yes" if want == (count, size) else "NO"]
            row += [f"{count}", f"{want[0]}" if want else "–", f"{size:,}", f"{want[1]:,}" if want else "–"]
            rows.append(row)
    kinds = sorted({kind for one in study.outcomes for kind in one.counted})
    bars = Bars(
        "Bytes of messages in a step",
        [one.name for one in study.outcomes],
        kinds,
        [[one.counted.get(kind, (0, 0))[1] for kind in kinds] for one in study.outcomes],
        binary_bytes,
    )
    columns = ["strategy", "collective", "equal", "calls", "by formula", "bytes", "by formula"]
    return Section("Collectives", text, columns, rows, bars, 4)


def rank_failures(study: Study) -> Section:
    jobs = [(one.name, one.job) for one in study.outcomes if one.job]
    slowest = max(job.ended_s for _, job in jobs)
    half = median(job.ended_s for _, job in jobs)
    text = (
        "A real `lmworks train` job of each strategy was started, and its last rank sent SIGKILL after a checkpoint. "
        f"The command ended after {half:.1f} s (median; at most {slowest:.1f} s). Resumed: as many ranks took up the "
        "newest checkpoint and made the next step. No strategy survives the loss of a rank: a shard of the only copy "
        "is gone, or a replica is missing from every reduction. The run continues from its checkpoint, with the same "
        "tensors in all strategies."
    )
    columns = ["strategy", "last line of the command", "resumed", "checkpoint", "files", "start", "step reached"]
    columns += ["committed", "exit code", "ended after"]
    rows = []
    for name, job in jobs:
        code = "did not end" if job.exit_code is None else f"{job.exit_code}"
        row = [name, job.said, job.resumed, binary_bytes(job.checkpoint_bytes), f"{job.checkpoint_files}"]
        row += [f"{job.start_s:.1f} s", f"{job.reached}", f"{job.committed}", code, f"{job.ended_s:.1f} s"]
        rows.append(row)
    return Section("Rank failure", text, columns, rows, None, 7)


# --- markdown and HTML -------------------------------------------------------------------------------


def as_markdown(study: Study) -> str:
    return sections_as_markdown(TITLE, [lead(study), *missing_notes(study)], sections(study))


def as_page(study: Study) -> str:
    return sections_as_page(TITLE, lead(study), missing_notes(study), sections(study))


def missing_notes(study: Study) -> list[str]:
    return [f"{name}: {why}." for name, why in study.missing.items()]
