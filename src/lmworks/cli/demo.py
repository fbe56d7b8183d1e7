"""`lmworks demo`: the whole path once, on this machine, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..record import RunFolder, read_metrics
from ..spec import RunSpec, load_run
from ..spec.files import check_writable
from .output import print_table

if TYPE_CHECKING:
    from ..plan.predict import Prediction

MIN_STEPS, MAX_STEPS = 600, 3000  # steps: enough to beat a bigram table, and few enough to wait for
SPEC = Path(__file__).with_name("demo.toml")
GAP = ("def read(path):\n    with open(", ") as file:\n        return file.read()\n")  # before and after the cursor
PROBLEMS = 20  # of the suite stdlib-infill
PROMPTS = ("    for name in", "    def __init__(self, name):\n        self.name")


def demo(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Where the run is kept (runs/demo).")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long training should take.")] = 120,
) -> None:
    """Plan, train, compare and use a small model on this machine.

    \b
    Examples:
      lmworks demo
      lmworks demo --seconds 30 --run-dir runs/short
    """
    from ..plan.predict import predict
    from ..report.run_report import write_report
    from ..train import Trainer
    from .plan import find_machine, print_memory, print_time
    from .train import unused_run_folder

    target = run_dir or unused_run_folder("demo")
    RunFolder(target).check_unused()
    check_writable(target, "--run-dir")
    heading(1, "Data: the standard library of this Python, as tokens")
    spec = load_run(SPEC)
    baseline = bigram_baseline(spec)

    heading(2, "Plan: what will it take?")
    machine = find_machine(spec.cluster, no_probe=False)
    prediction = predict(spec, machine)
    spec = fit_to_time(spec, prediction, seconds)
    print_memory(prediction)
    print_time(prediction, spec)
    typer.echo(f"so training takes {spec.optim.steps:,} steps")

    heading(3, "Train")
    trainer = Trainer(spec, target, machine=machine)
    result = trainer.run()
    report = write_report(trainer.folder)

    heading(4, "Compare: predicted against measured")
    compare(trainer.folder)
    better = "below" if result.loss < baseline else "NOT below"
    typer.echo(f"held-out loss {result.loss:.3f} nats/token, {better} the bigram baseline of {baseline:.3f}")

    heading(5, "Use: let it complete some Python")
    for prompt in PROMPTS:
        typer.echo(complete(trainer.folder.path, prompt) + "\n")
    show_infilling(trainer.folder.path, trainer.spec.data.seq)

    heading(6, "Results, and what to try next")
    run = trainer.folder.path
    typer.echo(f"report: {report}")
    typer.echo(f'more text:      lmworks generate {run} --prompt "import " --max-tokens 60')
    typer.echo(f"exact loss:     lmworks eval {run}")
    typer.echo("another shape:  lmworks train configs/small.toml model.layers=8 --run-dir runs/deeper")
    typer.echo("your own code:  lmworks data prepare src/ --tokenizer bpe:2048 --out data/mine")
    typer.echo(
        "a large model:  lmworks plan llama3-3b cluster.gpu=H200-SXM-141GB data.micro_batch=1 precision.dtype=bf16"
    )
    if result.loss >= baseline:
        raise typer.Exit(1)


def heading(number: int, text: str) -> None:
    typer.secho(f"\n{number}. {text}", bold=True)


def bigram_baseline(spec: RunSpec) -> float:
    """Held-out loss of a model that knows only which token follows which, counted on all training data."""
    from ..data import TokenData, bigram_loss, console_progress, read_index, resolve

    with console_progress() as progress:
        folder = resolve(spec.data.path, progress)
    index = read_index(folder)
    typer.echo(
        f"{index.documents('train'):,} files, {index.tokens('train'):,} tokens to train on; "
        f"{index.documents('val'):,} files, {index.tokens('val'):,} tokens held out"
    )
    loss = bigram_loss(TokenData.open(folder, "train"), TokenData.open(folder, "val"), index.vocab_size)
    typer.echo(f"a bigram table of all of it predicts the held-out files at {loss:.3f} nats/token")
    return loss


def fit_to_time(spec: RunSpec, prediction: Prediction, seconds: float) -> RunSpec:
    """As many steps as the planner thinks fit, within limits, if the machine stays as busy as it is."""
    if not prediction.time:
        return spec
    steps = round(seconds / (prediction.time.total * (prediction.machine.noise if prediction.machine else 1.0)))
    return spec.replace(optim=spec.optim.replace(steps=min(max(steps, MIN_STEPS), MAX_STEPS)))


def compare(folder: RunFolder) -> None:
    from ..report.predicted_vs_measured import busy_note, compare, read_prediction, table_of

    rows = compare(folder, read_metrics(folder.metrics_path))
    print_table(busy_note(read_prediction(folder)), *table_of(rows))
    for row in rows:
        if row.why:
            typer.secho(row.why, fg="yellow")


def show_infilling(run: Path, context: int) -> None:
    """One gap, with and without what follows it, and the score of a suite: whatever they are.

    `context`: the length that it was trained on. Its examples end there, so beyond it nothing but their end is likely.
    """
    from ..evals import load_suite, run_suite
    from ..evals.engine_model import EngineModel
    from ..evals.models import Completion, Prompt
    from ..llm import LLM
    from ..loading import trained_fim

    before, after = GAP
    typer.echo(f"The same model has learned to fill gaps. Between\n{before}▁{after}")
    answers: dict[int, Completion] = {}
    with LLM(run, context=context) as llm:
        model = EngineModel(llm, {"model": str(run)}, fim=trained_fim(run))
        asked = [Prompt(before, 0, 12, 0.0, 1.0, ("\n",), suffix) for suffix in (after, None)]
        model.generate(asked, answers.__setitem__)
        result = run_suite(model, load_suite("stdlib-infill"), run / "evals/stdlib-infill", PROBLEMS)
    typer.echo(f"it writes {answers[0].text!r}, and without the text after the cursor {answers[1].text!r}")
    exact, edit = result["metrics"]["exact"]["value"], result["metrics"]["edit"]["value"]
    typer.echo(
        f"of {PROBLEMS} statements of the standard library, most of which it was trained on, {exact * PROBLEMS:.0f} "
        f"are exactly as they were, edit similarity {edit:.2f}; more takes a larger model and more data "
        "(docs/code-models.md)"
    )


def complete(run: Path, prompt: str) -> str:
    """The prompt and its completion."""
    import torch

    from ..model import Sampling, generate
    from ..train.load_run import load_trained

    trained = load_trained(run)
    ids = torch.tensor([trained.tokenizer.encode(prompt)])
    room = trained.model.spec.context - ids.shape[1]
    out = generate(
        trained.model,
        ids.to(trained.model.device),
        min(48, room),
        Sampling(0.4, top_p=0.9, vocab=trained.tokenizer.vocab_size),
    )
    return trained.tokenizer.decode(out[0].tolist())
