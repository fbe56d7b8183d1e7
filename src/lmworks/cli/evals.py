"""`lmworks evals`: run suites of problems over a model, compare two models, refuse a regression."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.errors import LMWorksError, SpecError
from . import options
from .generate import Engine, EngineOverrides, Step, open_llm
from .groups import CommandGroup
from .output import Json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..evals.compare import Comparison
    from ..evals.models import EvalModel
    from ..evals.suite import Suite

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run evaluation suites over a model or server; compare.",
)

LEVEL = 0.05  # of --gate


class Regression(LMWorksError):
    """The model is worse than the baseline, beyond noise."""


@app.command("list")
def list_suites(json: Json = False) -> None:
    """List the suites, with their data and metrics.

    \b
    Examples:
      lmworks evals list
      lmworks evals list --json
    """
    from ..evals.suite import load_suite, suite_names

    suites = [load_suite(name) for name in suite_names()]
    if json:
        print_json([one.to_dict() for one in suites])
        return
    rows = [[one.name, one.about, ", ".join(one.metrics), one.data or own_data(one)] for one in suites]
    print_table("Suites", ["suite", "what is asked", "metrics", "data"], rows, drop=["metrics"])


def own_data(suite: Suite) -> str:
    """Where problems come from without a file."""
    if suite.format == "loss":
        return "the run's"
    return "--data" if suite.format == "perplexity" else "made here"


Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="[SUITE=]SOURCE", help="A file, or hf:NAME:CONFIG:SPLIT, in place of the suite's."),
]


@app.command("run")
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder (run, Hugging Face, quantized), or a preset.",
            autocompletion=options.sources,
        ),
    ] = None,
    overrides: EngineOverrides = None,
    suite: Annotated[str, typer.Option("--suite", metavar="NAME[,…]", help="Suites, or .toml files of them.")] = "",
    server: Annotated[str, typer.Option("--server", metavar="URL", help="A server with OpenAI's API instead.")] = "",
    name: Annotated[str, typer.Option("--model", help="The model's name on that server.")] = "",
    data: Data = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Only the first problems of each suite.")] = 0,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers to each problem.")] = None,
    k: Annotated[str, typer.Option("--k", metavar="K[,…]", help="Of pass@k, e.g. 1,10.")] = "",
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="0: greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Tokens of an answer.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Where everything is kept (default: evals/MODEL).")] = None,
    gate: Annotated[
        Path | None, typer.Option("--gate", metavar="BASELINE", help="Exit with 1 if worse than it, beyond noise.")
    ] = None,
    gate_p: Annotated[float, typer.Option("--gate-p", min=0, max=1, help="How sure of it: the largest p.")] = LEVEL,
    step: Step = None,
    engine: Engine = "native",
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once to a server.")] = 32,
    json: Json = False,
) -> None:
    """Run suites over a model; go on with one that was stopped.

    \b
    Examples:
      lmworks evals run runs/demo --suite loss,stdlib-imports --limit 20
      lmworks evals run exported/demo --suite humaneval --data problems.jsonl --samples 10 --k 1,10 --temperature 0.8
      lmworks evals run --server http://127.0.0.1:8000/v1 --model demo --suite stdlib-infill
      lmworks evals run runs/demo --suite loss --gate baseline.json --json
    """
    suites = chosen_suites(suite, data, changes_of(samples, k, temperature, max_tokens))
    check_model(model, server, name, step, chat)
    baseline = read_baseline(gate, [one.name for one in suites])
    target = out or Path("evals") / (name or Path(str(model)).name).replace("/", "_")
    from ..data.progress import console_progress

    results: dict[str, Any] = {}
    held_out = [one for one in suites if one.format == "loss"]
    others = [one for one in suites if one.format != "loss"]
    with console_progress() as progress:
        facts = {} if server else facts_of(str(model), step, engine, overrides)
        if held_out:
            from ..evals.held_out import held_out_result

            check_run(model)
            for one in held_out:
                results[one.name] = held_out_result(
                    Path(str(model)), step, facts, one, target / one.name, limit, progress
                )
        if others:
            from ..evals.runner import run_suite

            opened = open_model(model, overrides, server, name, chat, step, engine, seed, concurrency, facts)
            with opened as evaluated:
                for one in others:
                    results[one.name] = run_suite(evaluated, one, target / one.name, limit, seed, progress)
    summary = {"model": name or str(model), "out": str(target), "suites": results}
    if json:
        print_json(summary)
    else:
        print_results(results)
        typer.echo(f"samples, logs and verdicts: {target}")
    check_gate(baseline, gate, results, gate_p)


def chosen_suites(names: str, data: Sequence[str] | None, changes: Mapping[str, Any]) -> list[Suite]:
    from ..evals.suite import load_suite, suite_names

    listed = [one.strip() for one in names.split(",") if one.strip()]
    if not listed:
        raise SpecError(f"--suite NAME: which? One of {', '.join(suite_names())}, or a .toml file")
    places = data_of(data, listed)
    found = []
    for name in listed:
        own = {**changes, **({"data": places[name]} if name in places else {})}
        found.append(load_suite(name, own))
    called = [one.name for one in found]
    if double := next((name for name in called if called.count(name) > 1), None):
        raise SpecError(f"--suite {names}: two suites are called {double!r}")
    return found


def data_of(given: Sequence[str] | None, suites: Sequence[str]) -> dict[str, str]:
    """--data by suite; without a name, of the only suite."""
    found = {}
    for one in given or ():
        name, equals, place = one.partition("=")
        if equals and name in suites:
            found[name] = place
        elif len(suites) == 1:
            found[suites[0]] = one
        else:
            raise SpecError(f"--data {one}: of which suite? Write --data SUITE=FILE, SUITE one of {', '.join(suites)}")
    return found


def changes_of(samples: int | None, k: str, temperature: float | None, max_tokens: int | None) -> dict[str, Any]:
    asked = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens}
    generation = {name: value for name, value in asked.items() if value is not None}
    changes: dict[str, Any] = {"generation": generation} if generation else {}
    if k:
        try:
            changes["k"] = [int(one) for one in k.split(",")]
        except ValueError:
            raise SpecError(f"--k {k}: whole numbers are expected, e.g. 1,10") from None
    return changes


def check_model(model: str | None, server: str, name: str, step: int | None, chat: bool) -> None:
    if bool(model) == bool(server):
        raise SpecError("give a MODEL, or --server URL --model NAME; one of both")
    if server and not name:
        raise SpecError("--server needs --model NAME, as the server calls it")
    if name and not server:
        raise SpecError(f"--model {name} is a model's name on a --server; a folder or a preset is the first argument")
    if server and step is not None:
        raise SpecError("--step is a checkpoint of a run folder; a server has none")


def check_run(model: str | None) -> None:
    if model is None or not (Path(model) / "spec.toml").is_file():
        raise SpecError(
            f"suite loss: {model or 'a server'} is not a run folder; the suite perplexity takes --data FILE"
        )


def facts_of(model: str, step: int | None, engine: str, overrides: Sequence[str] | None) -> dict[str, Any]:
    """What tells two evaluations apart. Files of weights count by size and time: a run that was trained on is new."""
    folder = Path(model)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_weight(path, folder)]
    seen = [f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    digest = hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
    return {"model": model, "step": step, "engine": engine, "options": list(overrides or ()), "weights": digest}


def is_weight(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return path.suffix == ".safetensors" or (inside[0] == "checkpoints" and path.suffix == ".json")


def open_model(
    model: str | None,
    overrides: Sequence[str] | None,
    server: str,
    name: str,
    chat: bool,
    step: int | None,
    engine: str,
    seed: int,
    concurrency: int,
    facts: Mapping[str, Any],
) -> Any:
    """A context manager that gives the model to evaluate."""
    from contextlib import contextmanager

    @contextmanager
    def opened() -> Any:
        if server:
            from ..evals.server_model import ServerModel

            yield ServerModel(server, name, chat, concurrency)
            return
        from ..evals.engine_model import EngineModel
        from ..loading import trained_fim

        with open_llm(str(model), overrides, step, engine, seed, {}) as llm:
            evaluated: EvalModel = EngineModel(llm, dict(facts), chat, trained_fim(Path(str(model))))
            yield evaluated

    return opened()


def print_results(results: Mapping[str, Any]) -> None:
    rows = []
    for name, result in results.items():
        for place, (metric, found) in enumerate(result["metrics"].items()):
            head = [name, f"{result['problems']:,}", f"{result['samples']:,}"] if not place else ["", "", ""]
            rows.append([*head, metric, f"{found['value']:.4f}", f"{found['low']:.4f}–{found['high']:.4f}"])
    columns = ["suite", "problems", "samples", "metric", "value", "95 % interval"]
    print_table("Evaluation", columns, rows, drop=["samples", "problems"])
    for name, result in results.items():
        if result["errors"]:
            typer.echo(
                f"{name}: {result['errors']} requests were refused and count as wrong; `error` in verdicts.jsonl"
            )


# --- comparisons -----------------------------------------------------------------------------------------


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of an evaluation, or a file of its results.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same suites.")],
    metric: Annotated[str, typer.Option("--metric", help="Instead of each suite's first.")] = "",
    json: Json = False,
) -> None:
    """Compare two evaluations problem by problem, with a p-value.

    \b
    Examples:
      lmworks evals compare evals/demo evals/demo-int4
      lmworks evals compare baseline.json evals/demo --json
    """
    from ..evals.compare import compare_results
    from ..evals.results import read_result

    one, other = read_result(first), read_result(second)
    shared = [name for name in one if name in other]
    if not shared:
        raise SpecError(f"{first} and {second} have no suite in common: {', '.join(one)} and {', '.join(other)}")
    found = [compare_results(one[name], other[name], metric) for name in shared]
    if json:
        print_json([each.to_dict() for each in found])
    else:
        print_comparisons(found)


def print_comparisons(found: Sequence[Comparison]) -> None:
    rows = [
        [
            *(one.suite, one.metric, f"{one.problems:,}", f"{one.first:.4f}", f"{one.second:.4f}"),
            f"{one.difference:+.4f} ({one.low:+.4f} to {one.high:+.4f})",
            f"{one.better}, {one.worse}",
            f"{one.p:.3g}",
            one.test,
        ]
        for one in found
    ]
    columns = ["suite", "metric", "problems", "A", "B", "B − A", "better, worse", "p", "test"]
    print_table("Comparison", columns, rows, drop=["test", "problems", "better, worse"])


def read_baseline(gate: Path | None, suites: Sequence[str]) -> dict[str, Any]:
    from ..evals.compare import check_baseline
    from ..evals.results import read_result

    if gate is None:
        return {}
    baseline = read_result(gate)
    check_baseline(baseline, suites)
    return baseline


def check_gate(baseline: Mapping[str, Any], gate: Path | None, results: Mapping[str, Any], level: float) -> None:
    if gate is None:
        return
    from ..evals.compare import regressions, unscored

    if lost := unscored(baseline, results):
        raise Regression(f"cannot be held against {gate}: {'; '.join(lost)}; `error` in verdicts.jsonl")
    worse = regressions(baseline, results, level)
    if worse:
        said = "; ".join(map(str, worse))
        raise Regression(f"worse than {gate}, beyond noise: {said}")
    typer.echo(f"not worse than {gate} beyond noise (p < {level:g})", err=True)


@app.command("heatmap")
def heatmap(
    evaluation: Annotated[Path, typer.Argument(metavar="EVALUATION", help="A folder, or a file of its results.")],
    out: Annotated[Path, typer.Option("--out", help="An image, e.g. needle.png.")],
    suite: Annotated[str, typer.Option("--suite", help="Which one, where there are several.")] = "",
) -> None:
    """Draw the score of a needle suite by length and depth.

    \b
    Examples:
      lmworks evals heatmap evals/demo --suite needle --out needle.png
    """
    from ..evals.formats.needle import length_and_depth
    from ..evals.results import read_result
    from ..report.heat_map import draw_heat_map
    from ..report.plots import check_plot_path

    check_plot_path(out, "--out")
    found = read_result(evaluation)
    drawable = {name: one["groups"] for name, one in found.items() if any("depth" in group for group in one["groups"])}
    chosen = suite or next(iter(drawable), "")
    if chosen not in drawable:
        there = f"; those that have: {', '.join(drawable)}" if drawable else "; evaluate e.g. --suite needle first"
        raise SpecError(f"{evaluation}: {suite or 'what is in it'} has no scores by several lengths or depths{there}")
    scores = {length_and_depth(group): score for group, score in drawable[chosen].items()}
    draw_heat_map(scores, f"{chosen}: {found[chosen]['metric']}", out)
    typer.echo(f"drawn: {out}")


@app.command("export")
def export(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="A suite, or a .toml file.")],
    out: Annotated[Path, typer.Option("--out", help="A .jsonl file.")],
    data: Data = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Only the first problems.")] = 0,
) -> None:
    """Write a suite's problems as JSON lines.

    \b
    Examples:
      lmworks evals export stdlib-doctest --out doctests.jsonl
    """
    from ..evals.problems import load_problems
    from ..record.jsonl import encode

    (one,) = chosen_suites(suite, data, {})
    problems = load_problems(one, limit)
    write_file(out, b"".join(encode(each.to_dict()) for each in problems).decode(), "--out")
    typer.echo(f"{len(problems)} problems of {one.name}: {out}")
