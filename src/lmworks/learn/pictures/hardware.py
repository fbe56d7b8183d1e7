"""Pictures of hardware and of what runs on it: memories, kernels, collectives, a step's timeline, a job."""

from __future__ import annotations

from collections.abc import Callable

from ...record.formatting import binary_bytes, duration
from ..drawing import Drawing

H100 = "8xh100"
MULTIPROCESSORS = 132  # of an H100 SXM


def all_reduce_halves() -> Drawing:
    """Four ranks, each with a buffer of four chunks."""
    picture, ranks, side = Drawing(640, 250), range(4), 26
    columns = ((70, "before"), (280, "after reduce-scatter"), (500, "after all-gather"))
    for left, title in columns:
        picture.text(left + 2 * side, 20, title, bold=True)
    for rank in ranks:
        top = 36 + rank * (side + 10)
        for chunk in ranks:
            at = chunk * side
            picture.box(70 + at, top, side, side, shade="grey")
            picture.box(280 + at, top, side, side, shade="green" if chunk == rank else "white")
            picture.box(500 + at, top, side, side, shade="green")
        picture.text(10, top + 18, f"rank {rank}", anchor="start")
    for left, words in ((208, "each sums\na chunk"), (423, "each sends\nits sum")):
        picture.text(left + 18, 70, words, size=12)
        picture.arrow((left - 8, 108), (left + 44, 108))
    picture.legend(20, 200, (("own values", "grey"), ("sums of all ranks", "green"), ("freed, or not used", "white")))
    picture.text(20, 222, "DDP does both halves at once. ZeRO-2 updates a chunk of the weights in between.",
                 anchor="start")  # fmt: skip
    picture.text(20, 240, "FSDP gathers weights before each use, and reduce-scatters their gradients.",
                 anchor="start")  # fmt: skip
    return picture


def megatron_mlp() -> Drawing:
    picture = Drawing(640, 200)
    picture.text(60, 20, "each rank", bold=True)
    titles = ((165, "column parallel"), (300, "no message"), (425, "row parallel"), (565, "all-reduce"))
    for x, title in titles:
        picture.text(x, 20, title, bold=True)
    for rank, top in enumerate((40, 115)):
        shade = ("blue", "orange")[rank]
        picture.box(10, top, 80, 50, "X\nwhole", "grey")
        picture.box(112, top, 110, 50, f"X · A{rank + 1}\nhalf the columns", shade, size=12)
        picture.box(248, top, 106, 50, "GELU\nits own columns", shade, size=12)
        picture.box(382, top, 96, 50, f"· B{rank + 1}\nhalf the rows", shade, size=12)
        for left, right in ((90, 112), (222, 248), (354, 382)):
            picture.arrow((left, top + 25), (right, top + 25))
        picture.arrow((478, top + 25), (525, 98 + 10 * rank))
    picture.box(525, 77, 100, 52, "Z = Z1 + Z2\non both ranks", "green", size=12)
    picture.text(10, 192, "Backward: one all-reduce again, of X's gradient. Attention is cut alike, by heads.",
                 anchor="start")  # fmt: skip
    return picture


def gpu_memories() -> Drawing:
    """Bandwidths by the catalogue; latencies are those of published microbenchmarks."""
    from ...spec import parse_cluster

    gpu = parse_cluster(H100).accelerator
    assert gpu is not None
    on_chip = binary_bytes(MULTIPROCESSORS * 2**18)
    rows = (
        ("registers", f"256 KiB an SM, {on_chip} in all", "a thread's own", 150, "red"),
        ("shared memory, L1", f"256 KiB an SM, {on_chip} in all", "a block's; about 30 cycles", 200, "orange"),
        ("L2 cache", "50 MB", "all SMs; about 260 cycles", 250, "green"),
        ("HBM", f"{gpu.memory_gb:g} GB", f"{gpu.bandwidth_gbs / 1e3:g} TB/s; about 500 cycles", 300, "blue"),
        ("another GPU (NVLink)", "the same machine", f"{gpu.link_gbs:g} GB/s each way", 350, "purple"),
        ("another machine", "a port for each GPU", f"{gpu.nic_gbs:g} GB/s each way", 400, "grey"),
    )
    picture = Drawing(640, 268)
    for number, (name, size, rate, width, shade) in enumerate(rows):
        top = 8 + number * 38
        picture.box(10, top, width, 32, name, shade)
        picture.text(18 + width, top + 13, size, anchor="start", size=12)
        picture.text(18 + width, top + 28, rate, anchor="start", size=12)
    ridge = gpu.bf16_tflops * 1e3 / gpu.bandwidth_gbs
    picture.text(10, 256, f"{gpu.bf16_tflops:g} TFLOP/s in bf16 ÷ {gpu.bandwidth_gbs / 1e3:g} TB/s = {ridge:.0f} FLOP "
                 "a byte: below it, a kernel waits for HBM.", anchor="start", size=12)  # fmt: skip
    return picture


def step_timeline() -> Drawing:
    picture = Drawing(640, 262)
    lanes = {"host": 40, "GPU: compute": 100, "GPU: NCCL": 160}
    for name, top in lanes.items():
        picture.text(10, top + 20, name, anchor="start", bold=True)
        picture.line((110, top + 36), (630, top + 36), dashed=True)
    picture.box(112, 40, 68, 30, "batch", "grey")
    for left in (182, 196, 210, 224, 238, 252):
        picture.box(left, 40, 12, 30, shade="blue")
        picture.box(left + 10, 100, 6, 30, shade="green")
        picture.line((left + 6, 70), (left + 12, 100))
    for left in (266, 278, 290, 302):
        picture.box(left, 40, 10, 30, shade="blue")
    for number, left in enumerate((284, 354, 424)):
        picture.box(left, 100, 68, 30, "product", "green")
        picture.line((271 + 12 * number, 70), (left + 4, 100))
    picture.box(316, 40, 298, 30, "loss.item(): waits for the GPU", "red")
    picture.box(356, 160, 90, 30, "hidden", "purple")
    picture.box(494, 160, 76, 30, "exposed", "orange")
    picture.box(572, 100, 40, 30, "Adam", "green", size=12)
    picture.arrow((570, 160), (584, 130))
    labels = ((146, "1"), (224, "2"), (400, "3"), (532, "4"), (622, "5"))
    for left, label in labels:
        picture.text(left, 26, label, bold=True)
    picture.text(10, 222, "1: the input is late; 2: short kernels, the host is late; 3: a collective beside compute;",
                 anchor="start", size=12)  # fmt: skip
    picture.text(10, 242, "4: a collective that nothing hides; 5: after a synchronisation the queue is empty",
                 anchor="start", size=12)  # fmt: skip
    return picture


def triton_tiles() -> Drawing:
    """C = A · B in tiles: what one program reads and writes."""
    picture, side, row, column = Drawing(640, 190), 28, 1, 2
    for left, name in ((10, "A"), (152, "B"), (294, "C")):
        picture.text(left + 2 * side, 18, name, bold=True)
        for y in range(4):
            for x in range(4):
                used = {"A": y == row, "B": x == column, "C": (y, x) == (row, column)}[name]
                shade = {"A": "blue", "B": "orange", "C": "green"}[name] if used else "white"
                picture.box(left + x * side, 28 + y * side, side, side, shade=shade)
    picture.text(137, 88, "·", bold=True)
    picture.text(279, 88, "=", bold=True)
    lines = ((0, "one program: one tile of C"), (0, "for each k:"), (16, "a = tl.load(tile of A)"),
             (16, "b = tl.load(tile of B)"), (16, "acc = tl.dot(a, b, acc)"),
             (0, "tl.store(tile of C, acc)"))  # fmt: skip
    for number, (indent, words) in enumerate(lines):
        picture.text(432 + indent, 38 + number * 20, words, anchor="start", size=12)
    picture.text(20, 162, "CUDA: you write for a thread, and place threads, shared memory and barriers yourself.",
                 anchor="start")  # fmt: skip
    picture.text(20, 182, "Triton: you write for a tile; the compiler places all that within a program.",
                 anchor="start")  # fmt: skip
    return picture


def operator_path() -> Drawing:
    picture = Drawing(640, 230)
    picture.box(10, 90, 120, 50, "torch.ops.\nours.rms_norm", "grey")
    picture.box(175, 90, 120, 50, "dispatcher:\nthe schema", "blue")
    picture.arrow((130, 115), (175, 115))
    rows = (
        ("Autograd", "register_autograd: saves, calls again below", "purple"),
        ("FakeTensor", "register_fake: shapes alone, for tracing", "orange"),
        ("CPU", "a .cpp, compiled by the C++ compiler", "green"),
        ("CUDA", "a .cu, compiled by nvcc, or a Triton kernel", "green"),
    )
    for number, (key, what, shade) in enumerate(rows):
        top = 10 + number * 55
        picture.box(330, top, 300, 42, f"{key}\n{what}", shade, size=12)
        picture.arrow((295, 115), (330, top + 21))
    return picture


def ring_tree_cost() -> Drawing:
    """By `lmworks plan collective`, 64 H100 in 8 machines; each pair of bars has a scale of its own."""
    from ...plan.collective_algorithms.compare import compare
    from ...plan.collective_algorithms.costs import Group
    from ...spec import parse_cluster

    machines = parse_cluster("64xh100")
    gpu = machines.accelerator
    assert gpu is not None
    group, picture = Group.of(machines, gpu, 64), Drawing(640, 262)
    for number, nbytes in enumerate((2**16, 2**22, 2**28)):
        found = {row.algorithm.name: row for row in compare("all_reduce", nbytes, group).rows}
        rows = [
            (name.replace("_", " "), ((row.seconds, shade),), duration(row.seconds))
            for name, shade in (("ring", "blue"), ("double_tree", "orange"))
            for row in (found[name],)
        ]
        top = 10 + number * 86
        picture.text(10, top + 12, binary_bytes(nbytes), anchor="start", bold=True)
        picture.bars(10, top + 18, 620, rows)
    return picture


def job_path() -> Drawing:
    picture = Drawing(640, 250)
    picture.box(10, 15, 110, 50, "sbatch,\nkubectl apply", "grey")
    picture.box(160, 15, 150, 50, "scheduler: queue,\nquota, all or none", "blue")
    picture.arrow((120, 40), (160, 40))
    picture.arrow((235, 65), (235, 100))
    picture.arrow((310, 40), (510, 40), (510, 100))
    for number, left in enumerate((120, 390)):
        picture.box(left, 100, 240, 84, shade="white")
        picture.box(left + 10, 110, 220, 26, f"node {number}: torchrun agent", "purple")
        for rank in range(4):
            picture.box(left + 10 + rank * 56, 148, 52, 26, f"rank {number * 4 + rank}", "green", size=12)
            picture.arrow((left + 36 + rank * 56, 136), (left + 36 + rank * 56, 148))
        picture.arrow((left + 120, 184), (left + 120, 212))
    picture.arrow((350, 123), (400, 123))
    picture.arrow((400, 128), (350, 128))
    picture.text(375, 90, "rendezvous", size=12)
    picture.box(120, 212, 510, 28, "shared file system: data, run folder, checkpoints", "orange")
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "all_reduce_halves": all_reduce_halves,
    "megatron_mlp": megatron_mlp,
    "gpu_memories": gpu_memories,
    "step_timeline": step_timeline,
    "triton_tiles": triton_tiles,
    "operator_path": operator_path,
    "ring_tree_cost": ring_tree_cost,
    "job_path": job_path,
}
