"""Further exercise, `src/inference/batching.py`: single steps worked out by hand, then whole runs step by step."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..checking.expect import Mismatch, expect_at_most, expect_equal

TARGET = "a target of this exercise"
# (prompt, answer, arrival) of the requests; blocks, tokens of one, tokens of a step; steps.
RUNS = (
    ([(3, 2, 0)], (1, 4, 8), 2),
    ([(3, 2, 0), (3, 6, 0), (3, 4, 1)], (4, 4, 8), 6),
    ([(4, 8, 0), (4, 8, 0)], (4, 4, 8), 12),
    ([(8, 4, 0), (3, 30, 0), (20, 2, 1), (5, 12, 1), (9, 3, 2), (4, 25, 2), (16, 6, 3), (2, 9, 3), (7, 2, 4),
      (12, 18, 4), (5, 5, 5), (3, 14, 5)], (16, 4, 16), 44),
)  # fmt: skip


def continuous_batching(module: ModuleType) -> None:
    # Name, prompt, answer, written, cached of those that run; name, prompt, answer, written of those that wait.
    for case, sizes, running, waiting, work, after, remark in (
        ("A waits", (1, 4, 8), [], [("A", 3, 2, 0)], {"A": 3}, ("A", ""), "its whole prompt"),
        ("A runs", (1, 4, 8), [("A", 3, 3, 1, 3)], [], {"A": 1}, ("A", ""), "its newest token"),
        ("A has finished", (1, 4, 8), [("A", 3, 2, 2, 4)], [], {}, ("", ""), "it leaves, and its block is free"),
        ("A has finished, B runs", (2, 4, 8), [("A", 3, 2, 2, 4), ("B", 3, 4, 1, 3)], [], {"B": 1}, ("B", ""),
         "A leaves while B goes on"),
        ("A and B have finished", (2, 4, 8), [("A", 3, 2, 2, 4), ("B", 2, 2, 2, 3)], [], {}, ("", ""), "both leave"),
        ("A has finished, B waits", (1, 4, 8), [("A", 3, 2, 2, 4)], [("B", 4, 2, 0)], {"B": 4}, ("B", ""),
         "A's block is used in the same step"),
        ("A runs, B waits", (2, 4, 8), [("A", 3, 3, 1, 3)], [("B", 4, 2, 0)], {"A": 1, "B": 4}, ("AB", ""),
         "B begins while A runs"),
        ("B's prompt is long", (4, 4, 6), [("A", 3, 3, 1, 3)], [("B", 9, 2, 0)], {"A": 1, "B": 5}, ("AB", ""),
         "of B's prompt what A leaves of the budget"),
        ("B goes on with its prompt", (5, 4, 6), [("A", 3, 4, 1, 3), ("B", 9, 2, 0, 5)], [("C", 4, 2, 0)],
         {"A": 1, "B": 4, "C": 1}, ("ABC", ""), "running ones first, then C with what is left"),
        ("the budget is spent", (6, 4, 6), [], [("A", 6, 2, 0), ("B", 2, 2, 0)], {"A": 6}, ("A", "B"),
         "B waits for the next step"),
        ("blocks for C alone", (3, 4, 16), [("A", 3, 3, 1, 3)], [("B", 9, 2, 0), ("C", 2, 2, 0)], {"A": 1}, ("A", "BC"),
         "two blocks are free, B needs three, and C does not overtake it"),
        ("B needs a block", (2, 4, 8), [("A", 3, 4, 1, 3), ("B", 4, 4, 1, 4)], [], {"A": 1}, ("A", "B"),
         "B is the youngest that runs: it goes back itself"),
        ("A needs a block", (2, 4, 8), [("A", 4, 4, 1, 4), ("B", 3, 4, 1, 3)], [("C", 2, 2, 0)], {"A": 1}, ("A", "BC"),
         "B is the youngest: it goes back, in front of C"),
        ("A needs a block, C is the youngest", (4, 4, 8), [("A", 4, 4, 1, 4), ("B", 7, 4, 1, 7), ("C", 2, 4, 1, 2)], [],
         {"A": 1, "B": 1}, ("AB", "C"), "the youngest goes back, whoever holds most"),
        ("B comes back", (3, 4, 16), [("A", 3, 3, 1, 3)], [("B", 4, 9, 3)], {"A": 1, "B": 7}, ("AB", ""),
         "its prompt and what it has written: blocks for both, and both are computed again"),
        ("B comes back, one block is free", (2, 4, 16), [("A", 3, 3, 1, 3)], [("B", 4, 9, 3)], {"A": 1}, ("A", "B"),
         "its prompt and what it has written need two"),
        ("B's answer will be long", (3, 4, 16), [("A", 3, 3, 1, 3)], [("B", 4, 8, 0)], {"A": 1, "B": 4}, ("AB", ""),
         "blocks for the tokens that it has; those of its answer come one by one"),
    ):  # fmt: skip
        expect_step(module, case, sizes, running, waiting, work, after, remark)
    for requests, sizes, steps in RUNS:
        expect_run(module, requests, sizes, steps)


def expect_step(
    module: ModuleType, what: str, sizes: tuple[int, int, int], running: list[tuple[Any, ...]],
    waiting: list[tuple[Any, ...]], work: dict[str, int], after: tuple[str, str], remark: str,
) -> None:  # fmt: skip
    blocks, block, budget = sizes
    engine = module.Engine(*sizes)
    for name, prompt, answer, written, cached in running:
        one = module.Request(name, prompt, answer, written=written, cached=cached)
        one.table = [engine.free.pop() for _ in range(-(-max(prompt, cached) // block))]
        engine.running.append(one)
    engine.waiting += [
        module.Request(name, prompt, answer, written=written) for name, prompt, answer, written in waiting
    ]
    requests = [*engine.running, *engine.waiting]
    state = {
        "running": ", ".join(map(described, engine.running)) or "none",
        "waiting": ", ".join(map(described, engine.waiting)) or "none",
        "blocks": f"{len(engine.free)} of {blocks} are free, of {block} tokens each",
        "budget": f"{budget} tokens",
    }
    got = tokens_by_name(what, engine.schedule())
    expect_equal(f"{what}: tokens to compute", got, work, remark=remark, **state)
    names = "".join(one.name for one in engine.running), "".join(one.name for one in engine.waiting)
    expect_equal(f"{what}: running and waiting afterwards", names, after, remark=remark, **state)
    expect_pool(what, requests, engine, blocks)


def described(request: Any) -> str:
    blocks = f", {len(request.table)} block{'s' * (len(request.table) > 1)}" if request.table else ""
    return (
        f"{request.name} (prompt {request.prompt}, answer {request.answer}, {request.written} written, "
        f"{request.cached} cached{blocks})"
    )


def tokens_by_name(case: str, work: Any) -> dict[str, int]:
    try:
        pairs = [(request.name, int(tokens)) for request, tokens in work]
    except (TypeError, ValueError, AttributeError):
        raise Mismatch(case, "a list of (request, tokens)", work, remark="what `schedule` returns") from None
    if len(dict(pairs)) < len(pairs):
        raise Mismatch(case, "each request once", pairs, remark="what `schedule` returns")
    return dict(pairs)


def expect_pool(case: str, requests: list[Any], engine: Any, blocks: int) -> None:
    """Each block is free or in one table, and those that run have as many as their tokens need."""
    held = sorted(engine.free + [block for one in requests for block in one.table])
    remark = "each block is free, or in the table of one request"
    expect_equal(f"{case}: blocks that are free or in a table", held, list(range(blocks)), remark=remark)
    for one in requests:
        if one in engine.running:
            remark = "a request that runs has blocks for all its tokens, and no more"
            expect_equal(f"{case}: blocks of {one.name}", len(one.table), -(-one.tokens // engine.block), remark=remark)
        else:
            remark = "a request that does not run has no blocks, and nothing of it is cached"
            found = len(one.table), one.cached
            expect_equal(f"{case}: blocks and cached tokens of {one.name}", found, (0, 0), remark=remark)


def expect_run(module: ModuleType, lengths: list[tuple[int, int, int]], sizes: tuple[int, int, int], most: int) -> None:
    blocks, block, budget = sizes
    case = f"{len(lengths)} request{'s' * (len(lengths) > 1)}, {blocks} blocks of {block}, {budget} tokens a step"
    requests = [
        module.Request(chr(65 + index), prompt, answer, arrival)
        for index, (prompt, answer, arrival) in enumerate(lengths)
    ]
    engine, coming = module.Engine(*sizes), list(requests)
    for step in range(most):
        while coming and coming[0].arrival <= step:
            engine.waiting.append(coming.pop(0))
        work = engine.schedule()
        got = tokens_by_name(f"{case}: step {step}", work)
        remark = f"{TARGET}: a step computes no more tokens than the budget"
        expect_at_most(f"{case}: tokens of step {step}", sum(got.values()), budget, remark=remark, work=got)
        expect_pool(f"{case}: step {step}", requests, engine, blocks)
        engine.compute(work)
    left = [one.name for one in requests if not one.finished]
    static = module.static_steps(requests, *sizes)
    remark = f"{TARGET}: all are answered after {most} steps; static batching takes {static}"
    expect_equal(f"{case}: not answered after {most} steps", left, [], remark=remark, requests=lengths)


CHECKS = {"continuous_batching": continuous_batching}
