"""Pictures of training: warps and limits of kernels, laws of the loss, formats of numbers, ranks, bytes of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...record.formatting import binary_bytes, short
from ...scaling.law_file import read_law
from ...spec.hardware import catalogue
from ..drawing import Drawing
from ..what_if import Setting, answer

STATES = (("weights", "blue"), ("gradients", "green"), ("optimizer", "orange"), ("activations", "red"))


@dataclass(frozen=True)
class Axes:
    """Two logarithmic axes: a rectangle of the picture, and the values at its ends."""

    picture: Drawing
    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = (math.log(value / low) / math.log(high / low) for value, (low, high) in ((x, self.x), (y, self.y)))
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def frame(self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> None:
        bottom, right = self.top + self.height, self.left + self.width
        self.picture.line((self.left, self.top), (self.left, bottom), (right, bottom))
        for value, words in x_ticks:
            across, _ = self.at(value, self.y[0])
            self.picture.line((across, bottom), (across, bottom + 5))
            self.picture.text(across, bottom + 20, words)
        for value, words in y_ticks:
            _, up = self.at(self.x[0], value)
            self.picture.line((self.left - 5, up), (self.left, up))
            self.picture.text(self.left - 9, up + 5, words, anchor="end")

    def curve(self, points: Sequence[tuple[float, float]], dashed: bool = False) -> None:
        """Its parts within the frame."""
        inside = [(x, y) for x, y in points if self.y[0] <= y <= self.y[1]]
        self.picture.line(*(self.at(x, y) for x, y in inside), dashed=dashed)

    def dot(self, x: float, y: float, shade: str) -> None:
        across, up = self.at(x, y)
        self.picture.box(across - 4, up - 4, 8, 8, shade=shade)


def launch_to_warps() -> Drawing:
    """Below: warps that fit on an SM of compute capability 9.0 by the registers of a thread."""
    picture = Drawing(640, 290)
    steps = (
        "y = x @ w\nin Python", "operator,\nautograd node", "kernel launch,\nabout 5 µs", "grid of blocks,\non the SMs",
        "warps of\n32 threads",
    )  # fmt: skip
    wide = 112
    for number, words in enumerate(steps):
        left = 6 + number * (wide + 17)
        picture.box(left, 14, wide, 52, words, shade="blue" if number < 3 else "green")
        if number:
            picture.arrow((left - 17, 40), (left - 1, 40))
    picture.text(194, 86, "host: the queue has to stay ahead")
    picture.text(510, 86, "device: 132 SMs on an H100")
    picture.text(14, 122, "Warps that fit on an SM (of 64), by registers of a thread: occupancy", anchor="start")
    rows = []
    for registers in (32, 64, 128, 255):
        per_warp = 32 * 8 * math.ceil(registers / 8)  # handed out in units of 256 a warp
        warps = min(64, 65536 // per_warp // 4 * 4)  # four schedulers, with as many each
        rows.append((f"{registers} registers", [(float(warps), "green")], f"{warps} warps, {warps / 64:.1%}"))
    picture.bars(14, 136, 612, rows)
    words = "Few warps are enough where each has many independent instructions: matrix products."
    picture.text(14, 280, words, anchor="start")
    return picture


def isoflop_curves() -> Drawing:
    """By the law that the product ships (the refit of Chinchilla's runs), at C = 6 N D."""
    picture, law = Drawing(640, 330), read_law("chinchilla")
    axes = Axes(picture, 70, 34, 450, 240, (3e7, 1e11), (2.0, 3.6))
    axes.frame(
        [(value, short(value)) for value in (1e8, 1e9, 1e10, 1e11)],
        [(value, f"{value:.1f}") for value in (2.0, 2.4, 2.8, 3.2, 3.6)],
    )
    best = []
    for flops in (1e19, 1e20, 1e21, 1e22):
        sizes = [3e7 * 10 ** (step / 20) for step in range(71)]
        valley = [(size, law.predict(n=size, d=flops / 6 / size)["loss"]) for size in sizes]
        axes.curve(valley)
        best.append(min(valley, key=lambda point: point[1]))
        last = [point for point in valley if point[1] <= axes.y[1]][-1]
        across, up = axes.at(*last)
        picture.text(across + 8, up + 5, f"{flops:.0e} FLOP".replace("e+", "e"), anchor="start")
    axes.curve(best, dashed=True)
    for size, loss in best:
        axes.dot(size, loss, "orange")
    picture.text(24, 20, "loss, nats a token", anchor="start")
    picture.text(295, 314, "parameters N; the tokens are what the budget leaves, D = C / 6N")
    return picture


def global_batch() -> Drawing:
    picture = Drawing(640, 190)
    top, forward, backward = 30, 46, 80
    for rank in range(2):
        y = top + rank * 56
        picture.text(56, y + 25, f"rank {rank}", anchor="end")
        for number in range(3):
            left = 66 + number * (forward + backward)
            picture.box(left, y, forward, 38, f"F{number + 1}", shade="blue")
            picture.box(left + forward, y, backward, 38, f"B{number + 1}", shade="green")
    left = 66 + 3 * (forward + backward)
    picture.box(left, top, 66, 94, "all-\nreduce", shade="red")
    for rank in range(2):
        picture.box(left + 66, top + rank * 56, 66, 38, "AdamW", shade="orange")
    picture.text(255, 20, "3 micro-batches: gradients add up in place, nothing is sent")
    picture.text(66, 158, "B_global = B_micro · G_accum · W_dp = 4 · 3 · 2 = 24 sequences", anchor="start")
    picture.text(66, 180, "Activations: those of 4 sequences. Messages: those of one backward pass.", anchor="start")
    return picture


@dataclass(frozen=True)
class Float:
    """A format of `exponent` and `fraction` bits and a sign."""

    name: str
    exponent: int
    fraction: int
    largest: float

    @property
    def smallest(self) -> float:
        """Subnormal."""
        return 2.0 ** (2 - 2 ** (self.exponent - 1) - self.fraction)


def ieee(name: str, exponent: int, fraction: int) -> Float:
    """The highest exponent stands for infinity and NaN."""
    return Float(name, exponent, fraction, (2 - 2.0**-fraction) * 2.0 ** (2 ** (exponent - 1) - 1))


# E4M3 has no infinity: one pattern alone, 1.75 · 2⁸ + 0.25 · 2⁸, is NaN.
FORMATS = (
    ieee("fp32", 8, 23), ieee("bf16", 8, 7), ieee("fp16", 5, 10), ieee("E5M2", 5, 2), Float("E4M3", 4, 3, 448.0),
)  # fmt: skip


def number_formats() -> Drawing:
    picture, bit, rows, zero, power = Drawing(640, 250), 8.0, 34, 330 + 149 * 0.72, 0.72
    for words, left in (("bits", 60.0), ("range, as powers of two", 330.0), ("largest", 546.0)):
        picture.text(left, 20, words, anchor="start")
    for number, one in enumerate(FORMATS):
        y = 32 + number * rows
        picture.text(52, y + 17, one.name, anchor="end")
        left = 60.0
        for bits, shade in ((1, "grey"), (one.exponent, "orange"), (one.fraction, "blue")):
            picture.box(left, y, bits * bit, 24, str(bits) if bits > 1 else "", shade=shade)
            left += bits * bit
        low, high = (zero + math.log2(value) * power for value in (one.smallest, one.largest))
        picture.box(low, y + 5, high - low, 14, shade="green")
        picture.text(546, y + 17, f"{one.largest:.2g}" if one.largest > 1e6 else f"{one.largest:,.0f}", anchor="start")
    y = 32 + len(FORMATS) * rows + 4
    for exponent in (-149, 0, 128):
        picture.line((zero + exponent * power, y - 6), (zero + exponent * power, y))
        picture.text(zero + exponent * power, y + 15, str(exponent))
    picture.legend(60, 242, [("sign", "grey"), ("exponent: range", "orange"), ("fraction: precision", "blue")])
    return picture


def roofline_ops() -> Drawing:
    """By the datasheet of the catalogue. FLOPs and bytes of ops in bf16, each operand moved once."""
    picture, gpu = Drawing(640, 340), catalogue()["H100-SXM-80GB"]
    peak, rate = gpu.bf16_tflops * 1e12, gpu.bandwidth_gbs * 1e9
    axes = Axes(picture, 86, 34, 520, 240, (0.1, 1e4), (1e11, 2e15))
    axes.frame(
        [(0.1, "0.1"), (1, "1"), (10, "10"), (100, "100"), (1e3, "1,000"), (1e4, "10,000")],
        [(1e11, "0.1"), (1e12, "1"), (1e13, "10"), (1e14, "100"), (1e15, "1,000")],
    )
    axes.curve([(0.1, 0.1 * rate), (peak / rate, peak), (1e4, peak)])
    axes.curve([(peak / rate, 1e11), (peak / rate, peak)], dashed=True)
    square = 4096
    ops = (
        ("AdamW", 15 / 28, "orange", (12, 14)),  # about 15 FLOPs, 28 bytes of fp32 weight, gradient and moments
        ("decoding, a token", matmul_intensity(1, square, square), "orange", (12, 14)),
        ("decoding, 64 tokens", matmul_intensity(64, square, square), "orange", (-190, -4)),
        ("matmul 4,096³", matmul_intensity(square, square, square), "green", (-62, 24)),
    )
    for name, intensity, shade, (right, down) in ops:
        speed = min(peak, intensity * rate)
        axes.dot(intensity, speed, shade)
        across, up = axes.at(intensity, speed)
        picture.text(across + right, up + down, f"{name}: {intensity:,.1f}", anchor="start")
    picture.text(14, 20, "TFLOP/s that can be reached", anchor="start")
    across, _ = axes.at(peak / rate, peak)
    picture.text(across - 8, 262, f"ridge: {peak / rate:.0f} FLOP/byte", anchor="end")
    picture.text(346, 318, "arithmetic intensity, FLOPs for each byte of HBM")
    return picture


def matmul_intensity(rows: int, inner: int, columns: int) -> float:
    """FLOPs a byte in 16 bits."""
    return 2 * rows * inner * columns / (2 * (rows * inner + inner * columns + rows * columns))


def rank_grid() -> Drawing:
    """Ranks in the order of the mesh: pp, dp, tp, the last of them neighbours."""
    picture, tp, dp, pp = Drawing(640, 292), 4, 2, 2
    size = 60
    for stage in range(pp):
        y = 34 + stage * 116
        picture.text(92, y + 28, f"machine {stage}\nstage {stage}", anchor="end")
        for replica in range(dp):
            for part in range(tp):
                rank = (stage * dp + replica) * tp + part
                left = 106 + replica * (tp * size + 34) + part * size
                picture.box(left, y, size, 50, f"rank {rank}\ntp {part}", shade="blue" if replica == 0 else "green")
    for replica in range(dp):
        middle = 106 + replica * (tp * size + 34) + tp * size / 2
        picture.text(middle, 22, f"replica {replica}: its own data")
        picture.arrow((middle, 86), (middle, 148))
        picture.text(middle + 8, 121, "pp: activations", anchor="start")
    gap = 106 + tp * size
    for y in (59, 175):
        picture.arrow((gap + 1, y), (gap + 33, y))
        picture.arrow((gap + 33, y), (gap + 1, y))
    picture.text(gap + 17, 216, "dp: gradients")
    picture.text(106, 250, "tp: activations, four times a layer, between neighbours over NVLink", anchor="start")
    picture.text(106, 274, f"P = P_dp · P_tp · P_pp = {dp} · {tp} · {pp} = {dp * tp * pp}", anchor="start")
    return picture


def memory_choices() -> Drawing:
    """By the planner, of a rank among eight; the rest of what the allocator reserves is left out."""
    picture, rows = Drawing(640, 246), []
    choices = [("0", "none"), ("1", "none"), ("2", "none"), ("3", "none"), ("3", "selective"), ("3", "full")]
    for zero, recompute in choices:
        found = answer(Setting(zero=zero, micro_batch="2", micro_batches="1", recompute=recompute))
        parts = [(float(getattr(found, name)), shade) for name, shade in STATES]
        parts.append((found.reserved - sum(value for value, _ in parts), "grey"))
        name = f"ZeRO-{zero}" if recompute == "none" else f"ZeRO-{zero}, {recompute}"
        rows.append((name, parts, f"{binary_bytes(found.reserved)}, {found.fit}"))
    picture.bars(10, 10, 620, rows, label=130)
    picture.legend(90, 232, [*STATES, ("buffers", "grey")])
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    one.__name__: one
    for one in (
        launch_to_warps, isoflop_curves, global_batch, number_formats, roofline_ops, rank_grid, memory_choices,
    )
}  # fmt: skip
