"""The suite `loss`: a run on its own held-out data, window by window, so that two runs can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data.progress import Progress, silent
from .folder import EvaluationFolder
from .results import summarize
from .suite import Suite


def held_out_result(
    run: Path,
    step: int | None,
    facts: dict[str, Any],
    suite: Suite,
    out: Path,
    limit: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`limit`: micro-batches, as of `lmworks eval --batches`."""
    from ..train.evaluate import held_out, loss_by_window
    from ..train.load_run import load_trained

    folder = EvaluationFolder(out, {**facts, "suite": suite.to_dict(), "limit": limit})
    try:
        if not folder.verdicts:
            trained = load_trained(run, step)
            folder.claim()
            windows = loss_by_window(trained.model, held_out(trained.spec), trained.spec, limit)
            for number, (loss, tokens) in enumerate(windows):
                scored = {"scores": {"nll": loss}, "weights": {"nll": tokens}}
                folder.add_verdict({"problem": str(number), "sample": 0, **scored})
                progress(suite.name, number + 1, 0)
        result = {**facts, **summarize(suite, {}, list(folder.verdicts.values()))}
        folder.write("result.json", result)
    finally:
        folder.close()
    return result
