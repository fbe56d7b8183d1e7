"""DeepSpeed-Chat's published hours of RLHF (step 3) on 8 × A100-80GB beside what the planner says: fits, hours, shares.

    python validation/deepspeed_chat.py    writes benchmarks/results/deepspeed_chat.md

Sources: microsoft/DeepSpeed, blogs/deepspeed-chat/README.md (table 1: hours; one epoch of 135M tokens; at most 1,024
pairs a step); microsoft/DeepSpeedExamples, applications/DeepSpeed-Chat/training/step3_rlhf_finetuning:
BenckmarkSetting.md (264,292 prompts of 256 tokens, answers of exactly 256) and training_scripts/opt (ZeRO-3, activation
checkpointing, adapters of rank 128 on the actor's blocks, whose weights are frozen, answers a GPU, tensor parallelism
of generation).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmworks.plan.case import Case
from lmworks.plan.memory.reserve import usable
from lmworks.plan.memory.sheet import run_phases
from lmworks.plan.passes import REWARD, held_models
from lmworks.plan.round_time import Answers, forward_seconds, generate_seconds, hand_over_seconds, update_seconds
from lmworks.plan.serving.inference import Deployment, Rates
from lmworks.plan.serving.served_model import ServedModel
from lmworks.spec import RunSpec, load_run

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, GPUS, LARGEST = 264_292, 256, 256, 8, 1024
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "deepspeed_chat.md"


@dataclass(frozen=True)
class Row:
    model: str
    hours: float  # published
    dollars: float
    answers: int  # a GPU and round, as the script has it
    tp: int  # of generation
    rank: int  # of the actor's adapters (0: all weights are trained)


ROWS = (
    Row("opt-6.7b", 4.1, 132, 4, 1, 0),
    Row("opt-13b", 9.0, 290, 16, 2, 128),
    Row("opt-30b", 18.0, 580, 4, 4, 128),
    Row("opt-66b", 50.4, 1620, 4, 8, 128),
)
ASSUMPTIONS = (
    "Every answer has 256 tokens after a prompt of 256, as the benchmark page says; the blog's '131.9k queries' would "
    "be half of its own 135M tokens, so the page's 264,292 is taken.",
    "Weights of all models in 16 bits, ZeRO-3 over 8 ranks, every block computed again; the actors from 13B on train "
    "adapters of rank 128 on the layers of their blocks (the scripts train the embedding too: not counted), 6.7B all "
    "weights. Critic and reward model are OPT-350M, all of the critic is trained.",
    "Scoring is a forward pass of actor, reference, reward model and critic over 512 tokens.",
    "Generation: our roofline of an engine step with vLLM's fitted overheads, tensor parallelism as in the scripts "
    "(30B: 4, for which the script says nothing; 66B: the script is of 8 machines); DeepSpeed's kernels were not "
    "measured.",
    "Training: the constants of our own trainer, eager, on an A100.",
    "Two batches: that of the scripts (16 answers a GPU for 13B, else 4), and 1,024 answers a round, the largest that "
    "they allowed, in micro-batches of the script's size. Theirs was 'the largest that fits', and is not published by "
    "model: it lies between the two.",
    "Memory is that of our trainer with align.engine_tp as many ranks; a rank keeps its shard of the engine's weights "
    "during updates. The hand-over from ZeRO-3 to the engine is a part of generation.",
    "Not priced: tokenizing, loading, saving.",
)


def spec_of(row: Row, answers: int) -> RunSpec:
    return load_run(
        row.model,
        [
            "align.method=ppo", "align.reward_model=opt-350m", f"align.prompts={GPUS * answers}", "align.samples=1",
            f"align.max_tokens={ANSWER_TOKENS}", f"data.seq={PROMPT_TOKENS + ANSWER_TOKENS}", f"lora.rank={row.rank}",
            f"data.micro_batch={row.answers}", f"data.global_batch={GPUS * answers}", "precision.dtype=bf16",
            "precision.weights=bf16", f"parallel.dp={GPUS}", "parallel.strategy=fsdp2", "parallel.recompute=full",
            "cluster.gpu=A100-SXM-80GB", f"cluster.gpus_per_node={GPUS}", "align.engine_memory=0.95",
            f"align.engine_tp={row.tp}",
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    generate: float  # hours
    score: float
    update: float

    @property
    def hours(self) -> float:
        return self.generate + self.score + self.update


def predict(row: Row, answers: int) -> Prediction:
    spec = spec_of(row, answers)
    gpu = spec.cluster.accelerator
    assert gpu is not None
    case, rounds = Case.of(spec), PROMPTS / (GPUS * answers) / 3600
    engine = Deployment(ServedModel.of(spec.model), gpu, Rates.of("vllm"), tp=row.tp)
    group = Answers(answers * row.tp, 1, PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS)
    small = case.replace(model=held_models(spec)[REWARD].run.model, head="scalar", adapters=())
    large = case.replace(adapters=())
    score = 2 * forward_seconds(large) + 2 * forward_seconds(small)
    update = update_seconds(case) + update_seconds(small)
    generate = hand_over_seconds(spec, case) + generate_seconds(engine, group, group.count)
    return Prediction(rounds * generate, rounds * score, rounds * update)


def needs(row: Row) -> tuple[float, float, float]:
    """GiB of a rank: of the update, of generation, and of generation with an engine a rank."""
    spec = spec_of(row, row.answers)
    gpu = spec.cluster.accelerator
    assert gpu is not None
    whole = spec.replace(align=spec.align.replace(engine_tp=1))
    peaks, own = ({phase.phase: phase.peak for phase in run_phases(each, gpu).phases} for each in (spec, whole))
    return peaks["update"] / 2**30, peaks["generate"] / 2**30, own["generate"] / 2**30


def main() -> None:
    gpu = spec_of(ROWS[0], 16).cluster.accelerator
    assert gpu is not None
    room = usable(gpu) / 2**30
    lines = [
        "# DeepSpeed-Chat's RLHF on 8 × A100-80GB, published and predicted",
        "",
        "Written by `python validation/deepspeed_chat.py`. Nothing here was fitted to these figures.",
        "",
        "| actor | published, h | predicted, h: batch of the scripts | predicted, h: 1,024 answers a round "
        "| generate / score / update, % (scripts) | update, GiB | generate, GiB | fits "
        "| generate with an engine a rank, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        scripts, largest = predict(row, row.answers), predict(row, LARGEST // GPUS)
        parts = scripts.generate, scripts.score, scripts.update
        shares = " / ".join(f"{100 * part / scripts.hours:.0f}" for part in parts)
        update, cut, own = needs(row)
        fits = "yes" if max(update, cut) <= room else "no"
        ours = f"{own:.0f}{'' if own <= room else ' (does not fit)'}"
        lines.append(
            f"| {row.model} | {row.hours:g} | {scripts.hours:.1f} (× {scripts.hours / row.hours:.2f}) "
            f"| {largest.hours:.1f} (× {largest.hours / row.hours:.2f}) | {shares} "
            f"| {update:.1f} | {cut:.1f} | {fits} | {ours} |"
        )
    lines += ["", f"Usable of a GPU: {room:.1f} GiB. Assumptions:", "", *(f"- {one}" for one in ASSUMPTIONS), ""]
    RESULT.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
