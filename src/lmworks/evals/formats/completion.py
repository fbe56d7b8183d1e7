"""Code within its surroundings: SAFIM (gaps bounded by syntax), RepoBench (the next line, with other files)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ...spec.errors import DataError
from ..problem import Problem
from .format import Format, filled

if TYPE_CHECKING:
    from ..suite import Suite

GAPS = ("# TODO: Your code here", "/* TODO: Your code here */", "{{completion}}")
CONTEXT_CHARACTERS = 24_000  # of other files, the relevant one first


def safim(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    """Programs in Python are run on the cases; in other languages, and calls of an API, the text is compared."""
    shown, checked = row["prompt"], row["eval_prompt"]
    gap = next((one for one in GAPS if one in shown), None)
    if gap is None or GAPS[-1] not in checked:
        raise DataError(f"{place}: prompt has no gap ({GAPS[0]!r}), or eval_prompt no {GAPS[-1]!r}")
    cases = row.get("unit_tests") or []
    cases = json.loads(cases) if isinstance(cases, str) else cases
    language = str(row.get("lang") or "python").lower()
    prefix, _, suffix = shown.partition(gap)
    before, _, after = checked.partition(GAPS[-1])
    return Problem(
        id=str(row["task_id"]),
        prompt=filled(suite.prompt, prefix, row),
        suffix=suffix,
        answer=row["ground_truth"],
        before=before,
        after=after,
        cases=[[case["input"], case["output"]] for case in cases] if language == "python" else [],
        group=language,
    )


def repobench(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    """Snippets of other files as comments, then the file up to the line, as RepoBench's own baselines have it."""
    snippets = list(row["context"])
    gold = row.get("gold_snippet_index")
    if isinstance(gold, int) and 0 <= gold < len(snippets):
        snippets = [*snippets[:gold], *snippets[gold + 1 :], snippets[gold]]  # nearest to the code
    others: list[str] = []
    for one in reversed(snippets):
        text = f"# Path: {one['path']}\n{one['snippet']}\n\n"
        if sum(map(len, others)) + len(text) > CONTEXT_CHARACTERS:
            break
        others.insert(0, text)
    here = f"# Path: {row['file_path']}\n{row['import_statement']}\n\n{row['cropped_code']}\n"
    return Problem(
        id=str(row.get("id") or f"{row.get('repo_name', '')}/{row['file_path']}:{place.rpartition(' ')[2]}"),
        prompt=filled(suite.prompt, "".join(others) + here, row),
        answer=row["next_line"],
        group=str(row.get("level") or ""),
    )


SAFIM = Format(
    "fill a block, a condition or a call (task_id, prompt, eval_prompt, ground_truth, unit_tests)",
    ("pass", "exact", "edit"),
    ("task_id", "prompt", "eval_prompt", "ground_truth"),
    safim,
)
REPOBENCH = Format(
    "the next line, with snippets of other files (context, import_statement, cropped_code, file_path, next_line)",
    ("exact", "edit"),
    ("context", "import_statement", "cropped_code", "file_path", "next_line"),
    repobench,
    stop=("\n",),
)
