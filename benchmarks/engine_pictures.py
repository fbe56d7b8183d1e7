"""The pictures of docs/engine.md, drawn from a real run of the engine: a block table, and a batch step by step.

python benchmarks/engine_pictures.py        # writes docs/images/engine-*.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lmworks import LLM, SamplingParams
from lmworks.bench.engine import Trace, decodes, traced
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Sequence

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = ("#7fb3e6", "#f0b27a", "#9fd3a1", "#c9a7dd", "#f4a6a0", "#b9c0c9")
INK, PALE, PROMPT, ANSWER, LOST = "#333333", "#ececec", "#f0b27a", "#7fb3e6", "#c8504b"
matplotlib.rcParams |= {"svg.hashsalt": "lmworks", "svg.fonttype": "none", "font.family": "sans-serif"}


@contextmanager
def sheet(name: str, width: float, height: float) -> Iterator[Any]:
    """One unit an inch, from the top left corner down."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    yield axes
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"engine-{name}.svg", metadata={"Date": None})


def box(axes: Any, x: float, y: float, w: float, h: float, colour: str, label: str = "", **how: Any) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, **{"edgecolor": "white", "linewidth": 1.2, **how}))
    if label:
        say(axes, x + w / 2, y + h / 2, label)


def say(axes: Any, x: float, y: float, words: str, size: float = 8.5, align: str = "center", **how: Any) -> None:
    axes.text(x, y, words, ha=align, va="center", fontsize=size, **{"color": INK, **how})


# --- the block table --------------------------------------------------------------------------------------

SIZE, POOL = 4, 20


def half_way() -> tuple[Engine, dict[str, Sequence]]:
    """Four answers under way: B begins as A did, C is asked for two answers, and D has left its prompt behind."""
    engine = LLM("tiny", block=SIZE, blocks=POOL, max_batch_tokens=32).native
    params = SamplingParams(temperature=0, max_tokens=40)
    system = list(range(100, 108))  # what A, B and D begin with
    gone = Request([*system, 30, 31, 32, 33], SamplingParams(temperature=0, max_tokens=2))
    engine.add(gone)
    engine.run()
    a, b = Request([*system, 1, 2, 3], params), Request([*system, 9], params)
    c = Request([50, 51, 52, 53, 54, 55], SamplingParams(temperature=1, seed=1, n=2, max_tokens=40))
    for request in (a, b, c):
        engine.add(request)
    for _ in range(5):
        engine.step()
    named = {"A": a.sequences[0], "B": b.sequences[0], "C, first": c.sequences[0], "C, second": c.sequences[1]}
    return engine, named


def draw_blocks() -> None:
    engine, named = half_way()
    pool = engine.scheduler.block_manager
    colours = dict(zip(named, COLOURS, strict=False))
    holders = {block: [name for name, one in named.items() if block in one.blocks] for block in range(POOL)}
    with sheet("blocks", 9.6, 4.7) as axes:
        say(axes, 0.2, 0.25, "Block tables: tokens of each sequence, and the block that holds them", 10, "left")
        for row, (name, sequence) in enumerate(named.items()):
            y = 0.55 + 0.62 * row
            say(axes, 0.2, y + 0.2, name, 9, "left")
            for place, block in enumerate(sequence.blocks):
                x = 1.15 + 1.62 * place
                known = sequence.tokens[place * SIZE : (place + 1) * SIZE][
                    : max(0, sequence.num_computed_tokens - place * SIZE)
                ]
                shared = len(holders[block]) > 1
                box(axes, x, y, 1.5, 0.4, colours[holders[block][0]], linewidth=2, edgecolor=INK if shared else "white")
                say(axes, x + 0.68, y + 0.2, " ".join(str(token) for token in known) or "–", 7.5)
                say(axes, x + 1.38, y + 0.2, f"{block}", 8.5, fontweight="bold")
        say(axes, 0.2, 3.3, "The pool", 10, "left")
        for block in range(POOL):
            x, y = 0.2 + 0.46 * block, 3.5
            found = block in pool.block_hashes
            holding = holders[block]
            colour = colours[holding[0]] if holding else (PALE if found else "white")
            box(axes, x, y, 0.42, 0.42, colour, str(block), edgecolor=INK if len(holding) > 1 else "#bbbbbb")
            say(axes, x + 0.21, y + 0.56, f"×{pool.ref_counts[block]}" if holding else ("kept" if found else "free"), 7)
        say(
            axes,
            0.2,
            4.45,
            "bold: the block's number · dark frame: held by several · kept: nobody's, but found again by what it holds",
            8,
            "left",
        )


# --- a batch over time ------------------------------------------------------------------------------------

BUDGET = 48


def lived() -> tuple[Trace, list[Request]]:
    """Nine requests, in a pool too small for all of them: the last to come has to give its blocks up."""
    engine = LLM("tiny", block=8, blocks=22, max_batch_tokens=BUDGET, max_seqs=6, prefix_cache=False).native
    lengths = [(20, 14), (70, 10), (9, 22), (30, 8), (12, 16), (25, 12), (6, 9), (40, 6), (15, 11)]
    requests = [
        Request([place + 1] * prompt, SamplingParams(temperature=0, max_tokens=answer))
        for place, (prompt, answer) in enumerate(lengths)
    ]
    with traced(engine) as trace:
        for request in requests:
            engine.add(request)
        engine.run()
    return trace, requests


def draw_timeline() -> None:
    trace, requests = lived()
    wide, left = 0.215, 1.15
    width = left + wide * len(trace.steps) + 1.6
    with sheet("timeline", width, 5.7) as axes:
        say(axes, 0.15, 0.25, "Tokens of each step (dashed: the budget)", 10, "left")
        high = 0.9
        axes.plot([left, left + wide * len(trace.steps)], [0.5, 0.5], linestyle="--", color=INK, linewidth=0.8)
        for number, step in enumerate(trace.steps):
            x, base = left + wide * number, 0.5 + high
            for count, colour in ((step.decoding, ANSWER), (step.prompt_tokens, PROMPT)):
                tall = high * count / BUDGET
                box(axes, x, base - tall, wide, tall, colour, linewidth=0.6)
                base -= tall
        row = {request.sequences[0]: place for place, request in enumerate(requests)}
        for request in requests:
            sequence = request.sequences[0]
            y = 1.75 + 0.38 * row[sequence]
            say(axes, 0.15, y + 0.15, f"request {row[sequence] + 1}", 8.5, "left")
            draw_life(axes, trace, sequence, left, wide, y)
        y = 1.75 + 0.38 * len(requests) + 0.12
        for x, colour, words in ((left, PROMPT, "prompt (tokens)"), (left + 1.7, ANSWER, "one token of the answer")):
            box(axes, x, y, 0.25, 0.2, colour)
            say(axes, x + 0.33, y + 0.1, words, 8, "left")
        say(axes, left + 4.1, y + 0.1, "× gave up its blocks, to be computed again", 8, "left", color=LOST)


def draw_life(axes: Any, trace: Trace, sequence: Sequence, left: float, wide: float, y: float) -> None:
    """A box for each of its chunks, a line while it waits, a cross where it lost what it had."""
    spans = [(n, chunk) for n, step in enumerate(trace.steps) for chunk in step.chunks if chunk.sequence is sequence]
    seen, last = 0, 0
    axes.plot([left, left + wide * (spans[-1][0] + 1)], [y + 0.15] * 2, color="#cccccc", linewidth=1, zorder=0)
    for number, chunk in spans:
        x = left + wide * number
        if chunk.start < seen:
            say(axes, left + wide * (last + 1.5), y + 0.15, "×", 13, color=LOST, fontweight="bold")
        seen, last = chunk.start + chunk.count, number
        if decodes(chunk):
            box(axes, x, y, wide, 0.3, ANSWER, linewidth=0.6)
        else:
            box(axes, x, y, wide, 0.3, PROMPT, linewidth=0.6)
            say(axes, x + wide / 2, y + 0.15, str(chunk.count), 6.5)


if __name__ == "__main__":
    draw_blocks()
    draw_timeline()
    print(f"{IMAGES}/engine-blocks.svg and engine-timeline.svg")
