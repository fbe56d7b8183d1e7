"""Pictures of models: their budget, attention, number formats, a diverging run, code models."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

BUDGETS = (1e22, 1e23, 1e24)
GPUS, MFU = 1024, 0.4
# Name → bits of exponent and of fraction, and the largest number.
FORMATS = {
    "fp32": (8, 23, "3.4e38"),
    "bf16": (8, 7, "3.4e38"),
    "fp16": (5, 10, "65,504"),
    "fp8 E4M3": (4, 3, "448"),
    "fp8 E5M2": (5, 2, "57,344"),
}


def training_budget() -> Drawing:
    """Optimum of the refitted Chinchilla law; days are C over the FLOP/s that the GPUs reach."""
    from ...scaling.law_file import read_law
    from ...spec import parse_cluster

    gpu = parse_cluster("8xh100").accelerator
    assert gpu is not None
    law, picture = read_law("chinchilla"), Drawing(640, 200)
    stages = ("budget C", "parameters N", "tokens D", "loss", "days")
    for number, name in enumerate(stages):
        left = 10 + number * 128
        picture.box(left, 10, 104, 40, name, ("grey", "blue", "green", "orange", "purple")[number])
        if number:
            picture.arrow((left - 24, 30), (left, 30))
    for number, budget in enumerate(BUDGETS):
        best = law.optimum(budget)
        days = budget / (GPUS * gpu.bf16_tflops * 1e12 * MFU) / 86_400
        values = (f"{budget:.0e}", f"{best['n'] / 1e9:.3g}B", f"{best['d'] / 1e9:,.0f}B", f"{best['loss']:.2f}",
                  f"{days:.3g}")  # fmt: skip
        for column, words in enumerate(values):
            picture.text(62 + column * 128, 80 + number * 26, words)
    lines = (
        f"C = 6 · N · D. Days: on {GPUS:,} H100 that reach {MFU:.0%} of their bf16 peak.",
        "Served often, a model smaller than N and trained on more than D is the cheaper one.",
    )
    for number, words in enumerate(lines):
        picture.text(10, 166 + number * 20, words, anchor="start")
    return picture


def flash_tiles() -> Drawing:
    """Tiles of scores of causal attention, and what stays on the chip for one block of queries."""
    picture, side, blocks = Drawing(640, 240), 30, 6
    picture.text(10 + blocks * side / 2, 18, "blocks of keys and values", bold=True)
    for row in range(blocks):
        for column in range(blocks):
            shade = "blue" if column < row else "orange" if column == row else "white"
            picture.box(10 + column * side, 28 + row * side, side, side, shade=shade)
    top = 28 + 4 * side + side / 2
    picture.arrow((190, top), (250, top))
    picture.box(250, top - 40, 160, 76, "in registers, a row:\nmaximum m, sum ℓ,\naccumulator acc", "green")
    picture.arrow((410, top), (470, top))
    picture.box(470, top - 40, 160, 76, "written to HBM:\nO = acc / ℓ\nlse = m + ln ℓ", "grey")
    picture.text(250, 44, "A block of queries walks over its keys. A larger", anchor="start")
    picture.text(250, 62, "score rescales ℓ and acc by exp(m − m′).", anchor="start")
    computed = blocks * (blocks + 1) // 2
    picture.text(250, 88, f"{computed} of {blocks**2} tiles are computed; none is stored.", anchor="start")
    picture.legend(10, 232, (("whole tile", "blue"), ("masked tile", "orange"), ("skipped", "white")))
    return picture


def bit_layouts() -> Drawing:
    picture, bit = Drawing(640, 214), 11
    for number, (name, (exponent, fraction, largest)) in enumerate(FORMATS.items()):
        top, at = 8 + number * 34, 90.0
        picture.text(82, top + 18, name, anchor="end", bold=True)
        for bits, shade in ((1, "grey"), (exponent, "orange"), (fraction, "blue")):
            words = str(bits) if bits > 1 else ""
            picture.box(at, top, bits * bit, 26, words, shade, size=12)
            at += bits * bit
        picture.text(456, top + 11, f"largest {largest}", anchor="start", size=12)
        picture.text(456, top + 25, f"next to 1: 1 + 2^−{fraction}", anchor="start", size=12)
    picture.legend(90, 202, (("sign", "grey"), ("exponent: range", "orange"), ("fraction: digits", "blue")))
    return picture


def spike_diagnosis() -> Drawing:
    picture = Drawing(640, 250)
    picture.box(230, 8, 180, 40, "spike or NaN at step t", "red")
    picture.box(215, 74, 210, 40, "run the same batch again\nfrom the state before it", "grey")
    picture.arrow((320, 48), (320, 74))
    picture.box(20, 140, 170, 40, "good now: hardware", "orange")
    picture.box(440, 140, 180, 40, "bad again: data or model", "blue")
    picture.arrow((215, 94), (105, 94), (105, 140))
    picture.arrow((425, 94), (530, 94), (530, 140))
    rows = (
        (10, 190, "compare replicas,\nreplace the node", "orange"),
        (230, 180, "odd batch: skip it,\nclean the data", "green"),
        (430, 200, "usual batch: rate, warm-up,\nclipping, number format", "purple"),
    )
    for left, width, words, shade in rows:
        picture.box(left, 204, width, 40, words, shade, size=12)
    picture.arrow((105, 180), (105, 204))
    picture.arrow((480, 180), (330, 204))
    picture.arrow((540, 180), (540, 204))
    return picture


def fim_orders() -> Drawing:
    from ...spec.fim import FAMILIES

    names, picture = FAMILIES["starcoder"], Drawing(640, 226)
    parts = {
        "P": ("before the cursor", 160, "blue"),
        "M": ("middle", 80, "orange"),
        "S": ("after the cursor", 150, "green"),
    }
    tokens = {"P": names.prefix, "M": names.middle, "S": names.suffix}
    picture.text(10, 22, "a file", anchor="start", bold=True)
    at = 60.0
    for name in "PMS":
        words, width, shade = parts[name]
        picture.box(at, 8, width, 24, words, shade)
        at += width
    rows = ((58, "prefix first (PSM)", ("<P", "P", "<S", "S", "<M", "M")),
            (124, "suffix first (SPM)", ("<P", "<S", "S", "<M", "P", "M")))  # fmt: skip
    short = {"P": ("before", 70), "M": ("middle", 70), "S": ("after", 70)}
    for top, title, order in rows:
        picture.text(10, top + 12, title, anchor="start", bold=True)
        at = 10.0
        for name in order:
            if name[0] == "<":
                words, width, shade = tokens[name[1]], 112, "grey"
            else:
                (words, width), shade = short[name], parts[name][2]
            picture.box(at, top + 18, width, 24, words, shade, size=12)
            at += width + 4
    picture.text(10, 192, "The middle comes last in both, so a model that only reads to the left can write it.",
                 anchor="start")  # fmt: skip
    picture.text(10, 212, "Suffix first: what is typed is appended, so the KV cache of the suffix stays valid.",
                 anchor="start")  # fmt: skip
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "training_budget": training_budget,
    "flash_tiles": flash_tiles,
    "bit_layouts": bit_layouts,
    "spike_diagnosis": spike_diagnosis,
    "fim_orders": fim_orders,
}
