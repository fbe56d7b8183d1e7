"""Where published layouts stand in the layout search: writes a table of docs/planning.md and its figures.

    python validation/rank_layouts.py    all ten of `published/layouts.toml`, some minutes

Figures, with the five best layouts of each, go to benchmarks/results/published_layouts.json.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from lmworks.plan.step.price import price
from lmworks_validation.layouts import Configuration, Layout, Priced, Ranked, configurations, least_bytes
from write_tables import fill, markdown

ROOT = Path(__file__).parent.parent
PAGE, RESULT = ROOT / "docs" / "planning.md", ROOT / "benchmarks" / "results" / "published_layouts.json"
BEGIN, END = "<!-- layouts: validation/rank_layouts.py -->\n", "<!-- end of layouts -->"
COLUMNS = ("configuration", "published layout", "rank", "of degrees", "tokens/s a GPU", "five best", "best layout")
COLUMNS += ("one change gains most", "near", "measured")


def told(layout: Layout) -> dict[str, Any]:
    return {"layout": layout.case.text, "tokens_per_s_gpu": round(layout.tokens_per_s_gpu, 1)}


def figures(configuration: Configuration) -> dict[str, Any]:
    priced = Priced.of(configuration.problems)
    ranked, problem = Ranked.of(priced, configuration.published), configuration.problems[0]
    low, high = (float(seconds) / ranked.published.step_s for seconds in price(ranked.published.case).interval)
    changes = {group: told(layout) for group, layout in ranked.single_changes().items()}
    return {
        "configuration": configuration.label,
        "seq": problem.seq,
        "global_batch": problem.global_batch,
        "dtype": problem.dtype,
        "stated": dict(configuration.published),
        "fitting": len(priced.seconds),
        "published": told(ranked.published),
        "interval": [round(low, 3), round(high, 3)],
        "recompute_changed": ranked.recomputes,
        "published_gib": round(least_bytes(configuration) / 2**30, 1),
        "room_gib": round(problem.safe_bytes / 2**30, 1),
        "rank": ranked.rank,
        "rank_of_degrees": ranked.rank_of_degrees,
        "behind": round(ranked.behind, 4),
        "within_2_percent_of_best": ranked.near,
        "inside_interval_of_best": ranked.inside_interval,
        "five_best": [told(priced[place]) for place in range(5)],
        "five_best_degrees": [told(layout) for layout in ranked.best_degrees],
        "single_changes": changes,
        "measured": round(configuration.measured, 1) if configuration.measured else None,
        "note": configuration.note,
        "source": configuration.source,
    }


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.1f}"


def cells(row: dict[str, Any]) -> list[str]:
    own, best = row["published"], row["five_best"]
    gains = [(one["tokens_per_s_gpu"], group, one["layout"]) for group, one in row["single_changes"].items()]
    most = max(gains, default=(0.0, "", ""))
    change = f"{most[1]}: {most[2]} ({rate(most[0])})" if most[0] > own["tokens_per_s_gpu"] else "–"
    stated = own["layout"] + (
        f" (published without, {row['published_gib']:.0f} GiB)" if row["recompute_changed"] else ""
    )
    return [
        row["configuration"],
        stated,
        str(row["rank"]),
        str(row["rank_of_degrees"]),
        rate(own["tokens_per_s_gpu"]),
        f"{rate(best[-1]['tokens_per_s_gpu'])} to {rate(best[0]['tokens_per_s_gpu'])}",
        best[0]["layout"] if row["rank"] > 1 else "the same",
        change,
        f"{row['within_2_percent_of_best']}; {'yes' if row['inside_interval_of_best'] else 'no'}",
        f"{rate(row['measured'])} ({row['note']})" if row["measured"] else f"– ({row['note']})",
    ]


def main() -> None:
    rows = []
    for configuration in configurations():
        rows.append(figures(configuration))
        print(*cells(rows[-1]), sep=" | ", flush=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    result = {"date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(), "configurations": rows}
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join(markdown(COLUMNS, [cells(row) for row in rows])) + "\n"
    PAGE.write_text(fill(page, BEGIN, END, table), encoding="utf-8")


if __name__ == "__main__":
    main()
