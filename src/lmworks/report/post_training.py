"""The part of report.html that post-training adds: rewards, KL, entropy and lengths of answers, preferences,
calibration, the time of a round, and samples of what the model wrote."""

from __future__ import annotations

from collections.abc import Mapping

from ..record import RunFolder
from ..record.formatting import duration
from ..record.run_summary import Steps
from ..record.samples import by_source, printable, read_samples, short_source, spread
from ..spec import RunSpec
from .html_page import StyledCell, chart_cards, note, table
from .svg import Line, Points, line_chart, stacked_chart

Tile = tuple[str, str, str]  # name, figure, note
SHOWN_ROUNDS, SHOWN_CHARACTERS = 6, 1000  # of samples
SUMMARY = ("mean", "std", "equal_groups")  # reward/…: of all sources; other names are sources
SHARE = "val_calibration/share_"  # and the number of a bin of the probability that a reward model gives to its choice
PHASES = ("generation and rewards", "sleep, wake, hand-over", "scoring", "update", "update of the critic")


def post_training(folder: RunFolder, spec: RunSpec, steps: Steps) -> str:
    """Empty for pretraining and where nothing of it is recorded."""
    cards = {title: chart for title, chart in method_charts(spec, steps).items() if chart}
    parts = [f"<h2>Post-training: {spec.align.method}</h2>{chart_cards(cards)}"] if cards else []
    if (error := calibration_error(steps)) is not None:
        parts.append(note(f"Expected calibration error of the last evaluation: {error:.3f}."))
    return "".join([*parts, samples(folder)])


def reward_tiles(spec: RunSpec, steps: Steps) -> list[Tile]:
    """Of an online run: the reward of training prompts, and of held-out ones."""
    if not spec.align.online or not (training := points(steps, "reward/mean")):
        return []
    found = [("reward", f"{training[-1][1]:.4f}", f"last round; {training[0][1]:.4f} in the first")]
    if held_out := points(steps, "val_reward/mean"):
        step, best = max(held_out, key=lambda point: point[1])
        found.append(("held-out reward", f"{held_out[-1][1]:.4f}", f"best {best:.4f} at step {step:,}"))
    return found


def method_charts(spec: RunSpec, steps: Steps) -> dict[str, str]:
    found = distill_charts(steps) if spec.align.method == "distill" else {}
    if spec.align.online:
        return found | online_charts(spec, steps)
    return found or (preference_charts(steps) if spec.align.method else {})


def online_charts(spec: RunSpec, steps: Steps) -> dict[str, str]:
    sources = {key for step in steps for key in step if key.startswith("reward/")}
    sources -= {f"reward/{key}" for key in SUMMARY}
    names = {key: short_source(key.removeprefix("reward/")) for key in sorted(sources)} if len(sources) > 1 else {}
    kl = {"kl_answer": "mean of a round"}
    return {
        "Reward": chart(steps, {"reward/mean": "mean", **names}, "reward", {"val_reward/mean": "held-out prompts"}),
        "KL divergence of an answer from the reference": chart(steps, kl, "nats", limit=spec.align.kl_stop),
        "Entropy": chart(steps, {"entropy": "policy"}, "nats a token", zero=True),
        "Length of answers": chart(
            steps, {"completion/mean_length": "mean", "completion/max_length": "longest"}, "tokens", zero=True
        ),
        "Ends of answers, groups without a signal": chart(
            steps,
            {
                "completion/ended": "ended by itself",
                "completion/clipped": "cut at align.max_tokens",
                "reward/equal_groups": "groups of equal rewards",
            },
            "share",
            zero=True,
        ),
        "Log-probabilities: sampler against trainer": chart(
            steps, {"sampler_diff/mean": "mean", "sampler_diff/max": "largest"}, "nats a token", zero=True
        ),
        "Clipped ratios": chart(
            steps,
            {
                "clip_ratio/low_mean": "below",
                "clip_ratio/high_mean": "above",
                "importance_weight/capped": "capped importance weights",
            },
            "share of tokens",
            zero=True,
        ),
        "Staleness of answers": chart(
            steps, {"staleness/mean": "mean", "staleness/max": "largest"}, "rounds", zero=True
        ),
        "Critic": chart(steps, {"value/explained_variance": "explained variance"}, "share"),
        "KL coefficient": chart(steps, {"kl_coef": "align.beta, adapted"}, "coefficient"),
        "Where a round's time goes": round_chart(steps),
    }  # fmt: skip


def preference_charts(steps: Steps) -> dict[str, str]:
    return {
        "Pairs in the right order": with_held_out(steps, "rewards/accuracies", "share"),
        "Margin between the rewards of a pair": with_held_out(steps, "rewards/margins", "reward"),
        "Rewards": chart(steps, {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}, "reward"),
        "KL estimate": chart(steps, {"kl": "of mismatched answers"}, "nats"),
        "Negative log-likelihood of chosen answers": with_held_out(steps, "nll", "nats a token"),
        "Brier score (0.25: a guess)": with_held_out(steps, "rewards/brier", "squared error"),
        "Reliability, last evaluation": reliability_chart(steps),
    }


def distill_charts(steps: Steps) -> dict[str, str]:
    """Of given answers, or of the student's own."""
    return {
        "Divergence between student and teacher": with_held_out(steps, "divergence", "divergence a token"),
        "Tokens at which both have the same first choice": with_held_out(steps, "top1_agreement", "share"),
        "Negative log-likelihood of the answers": with_held_out(steps, "nll", "nats a token"),
    }


def with_held_out(steps: Steps, key: str, y: str) -> str:
    return chart(steps, {key: "training"}, y, {f"val_{key}": "held-out"})


def chart(
    steps: Steps,
    lines: Mapping[str, str],
    y: str,
    held_out: Mapping[str, str] | None = None,
    *,
    zero: bool = False,
    limit: float = 0.0,
) -> str:
    """Curves of these metrics, with their names; empty where none was recorded."""
    drawn = [Line(name, points(steps, key), style(index)) for index, (key, name) in enumerate(lines.items())]
    for key, name in (held_out or {}).items():
        drawn.append(Line(name, points(steps, key), style(len(drawn)), dots=True))
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return ""
    if limit:
        ends = [min(line.points[0][0] for line in drawn), max(line.points[-1][0] for line in drawn)]
        drawn.append(Line("limit", [(end, limit) for end in ends], "s4 faint"))
    return line_chart(drawn, zero=zero, show="{:.4g}".format, y=y)


def style(index: int) -> str:
    return f"s{index % 5}"


def points(steps: Steps, key: str) -> Points:
    return [(step["step"], step[key]) for step in steps if step.get(key) is not None]


def round_chart(steps: Steps) -> str:
    """A round begins with the step that has the time of its generation."""
    rows: list[tuple[float, list[float]]] = []
    for step in steps:

        def seconds(key: str, step: Mapping[str, float] = step) -> float:
            return step.get(key) or 0.0

        if "generate_s" in step:
            moved = seconds("hand_over_s")
            generation = seconds("generate_s") + seconds("reward_s")
            if "rollout_wait_s" in step:  # other ranks sample, while this one trains
                generation = seconds("rollout_wait_s")
            rows.append((step["step"], [generation, moved + seconds("sleep_wake_s"), seconds("score_s"), 0.0, 0.0]))
        if rows:
            rows[-1][1][3] += seconds("forward_backward_s") + seconds("optimizer_s")
            rows[-1][1][4] += seconds("critic_s")
    return stacked_chart(PHASES, rows, duration, "time of a round") if rows else ""


# --- calibration of a reward model ------------------------------------------------------------------------


def reliability(steps: Steps) -> list[tuple[float, float, float]]:
    """Of the last evaluation, by bin: mean probability that the model gives to its choice, share of choices that are
    right, share of the pairs."""
    evaluated = [step for step in steps if f"{SHARE}0" in step]
    if not evaluated:
        return []
    last = evaluated[-1]
    found = []
    for index in range(sum(key.startswith(SHARE) for key in last)):
        keys = (f"val_calibration/{name}_{index}" for name in ("confidence", "accuracy", "share"))
        confidence, accuracy, share = map(last.get, keys)
        if confidence is not None and accuracy is not None and share:
            found.append((confidence, accuracy, share))
    return found


def reliability_chart(steps: Steps) -> str:
    found = reliability(steps)
    if not found:
        return ""
    lines = [
        Line("calibrated", [(0.5, 0.5), (1.0, 1.0)], "s4 faint"),
        Line("held-out pairs", [(confidence, accuracy) for confidence, accuracy, _ in found], "s0", dots=True),
    ]
    return line_chart(lines, show="{:.3g}".format, x="probability of the choice", y="share of right choices")


def calibration_error(steps: Steps) -> float | None:
    """Mean distance of the two over all pairs (Guo et al. 2017)."""
    found = reliability(steps)
    return sum(share * abs(confidence - accuracy) for confidence, accuracy, share in found) if found else None


# --- samples ----------------------------------------------------------------------------------------------


def samples(folder: RunFolder) -> str:
    rounds = read_samples(folder.samples_path)
    if not rounds:
        return ""
    rows: list[list[str]] = []
    for line in spread(rounds, SHOWN_ROUNDS):
        for sample in line["answers"]:
            reward = "–" if sample["reward"] is None else f"{sample['reward']:.3g}"
            end = "ended" if sample["ended"] else "cut"
            texts = [StyledCell(cut(sample[key]), "sample") for key in ("prompt", "answer")]
            size = f"{sample['tokens']:,}, {end}"
            rows.append([f"{line['round']:,}", f"{line['step']:,}", *texts, by_source(sample), size, reward])
    columns = ["round", "step", "prompt", "answer", "by source", "tokens", "reward"]
    about = f"{len(rounds):,} rounds have samples: the best answer, the worst, and others at random"
    about += f"; `lmworks runs samples {folder.path}` shows more."
    return f"<h2>Samples</h2>{table(columns, rows, numeric=1, whole=2)}{note(about)}"


def cut(text: str) -> str:
    return printable(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …")
