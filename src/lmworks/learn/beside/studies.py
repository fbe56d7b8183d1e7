"""Data, scaling laws, ASHA and replicas beside LMWorks' own."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row


def pack(module: ModuleType) -> list[Row]:
    from ...data.packing import pack

    lengths = [1 + 37 * index % 101 for index in range(500)]
    return [
        Row(f"rows of {size} for 500 documents", len(module.pack(lengths, size)), len(pack(lengths, size)))
        for size in (128, 1024)
    ]


def bpe(module: ModuleType) -> list[Row]:
    """The library that LMWorks trains tokenizers with, given the same merges."""
    from tokenizers import Tokenizer, models

    from ..course_files import course_sources

    words: dict[str, int] = {}
    for word in course_sources()["src/models/gpt.py"].split():
        words[word] = words.get(word, 0) + 1
    merges = module.train_bpe(words, 50)
    pieces = sorted({letter for word in words for letter in word} | {one + other for one, other in merges})
    library = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    rows = []
    for name in ("the first", "the last"):
        some = sorted(words)[:200] if name == "the first" else sorted(words)[-200:]
        ours = sum(len(library.encode(word).tokens) for word in some)
        rows.append(Row(f"tokens of {name} 200 words", sum(len(module.encode(word, merges)) for word in some), ours))
    return rows


def minhash(module: ModuleType) -> list[Row]:
    from ...curate.minhash import PROSE

    return [
        Row(f"chance to find a pair of similarity {similar}", module.chance(similar, PROSE.bands, PROSE.rows),
            PROSE.chance(similar))
        for similar in (0.5, 0.72, 0.8)
    ]  # fmt: skip


def scaling_law(module: ModuleType) -> list[Row]:
    """The constants of Hoffmann et al. as Besiroglu et al. fitted them again."""
    import math

    import numpy as np

    from ...scaling.laws import LAWS
    from ...scaling.optimum import FlopRule, optimum

    constants = {"A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}
    rows = []
    for flops in (1e20, 1e23):
        yours = module.compute_optimal(flops, *constants.values())
        theta = np.array([[math.log(1.8172), math.log(482.01), 0.3478, math.log(2085.43), 0.3658]])
        ours = optimum(LAWS["chinchilla"], theta, flops, FlopRule())
        rows.append(Row(f"{flops:g} FLOP: parameters", yours[0], float(ours.n[0])))
    return rows


def asha(module: ModuleType) -> list[Row]:
    """Which trials are promoted, while 27 of them report one after another."""
    from ...tune.stoppers import Asha, Results

    stopper, results = Asha((1, 3, 9), 3, 27), Results()
    rungs: list[dict[int, float]] = [{}, {}, {}]
    promoted: list[list[int]] = [[], []]
    for trial in range(27):
        loss = (trial * 7 % 27) / 10
        results.report(trial, 1, loss)
        rungs[0][trial] = loss
        while (next_one := stopper.promotion(results, all_started=False)) is not None:
            mine = module.promotion(rungs, set(), 3)
            promoted[0].append(-1 if mine is None else mine[0])
            promoted[1].append(next_one)
            rung = 1 if results.latest(next_one) == 1 else 2
            results.report(next_one, stopper.rungs[rung], results.losses[next_one][1])
            if rung == 2:
                results.finished.add(next_one)
            rungs[rung][next_one] = rungs[0][next_one]
    return [
        Row("promotions", len(promoted[0]), len(promoted[1])),
        Row("sum of the promoted trials' numbers, each by its turn",
            *(sum(turn * trial for turn, trial in enumerate(one, 1)) for one in promoted)),
    ]  # fmt: skip


def corrupted_rank(module: ModuleType) -> list[Row]:
    from ...train.health.replicas import find_outliers

    cases = {"2 and 5 of 8": {rank: 1 + rank * (rank in (2, 5)) for rank in range(8)}, "one of 2": {0: 1, 1: 2}}
    return [
        Row(f"{name} differ: ranks named", len(module.outliers(digests)), len(find_outliers(digests)))
        for name, digests in cases.items()
    ]


BESIDE: dict[str, Beside] = {
    "pack": pack,
    "bpe": bpe,
    "minhash": minhash,
    "scaling_law": scaling_law,
    "asha": asha,
    "corrupted_rank": corrupted_rank,
}
