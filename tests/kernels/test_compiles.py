"""Kernels of the engine compiled for a Hopper GPU on a machine without one: types, shapes, shared memory, registers.

What the interpreter does not see: a product that no tensor core takes, an instruction that the assembler refuses, more
shared memory than a multiprocessor has, a loop that spills its registers. Nothing is run.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.kernels.inference.gumbel_sample import RowParams
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache, SharedPrefixes
from lmworks.kernels.inference.top_k_top_p import TruncationParams

triton = pytest.importorskip("triton")
triton_support = pytest.importorskip("lmworks.kernels.triton_support")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted here"),
]

HOPPER, SHARED_BYTES = 90, 232_448
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.int8: "i8", torch.bool: "i1", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def described(kernel: Any, given: dict[str, Any]) -> Any:
    """What Triton specialises a kernel for when it is launched with these arguments, as its compiler wants it told."""
    signature, constants, facts = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
            continue
        aligned = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            facts[place,] = [["tt.divisibility", 16]]
        kind = f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else {int: "i32", float: "fp32"}[type(value)]
        kind = parameter.annotation_type or kind
        signature[parameter.name] = kind
    return triton.compiler.ASTSource(kernel, signature, constants, facts)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, where launches only compile."""
    found: list[Any] = []
    target = triton.backends.compiler.GPUTarget("cuda", HOPPER, 32)

    def launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, values, strict=False)), **named}
        options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
        found.append(triton.compile(described(kernel, given), target=target, options=options))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", launch)
    monkeypatch.setattr(triton_support, "supports_pdl", lambda _device: True)
    return found


def attend(held: torch.dtype, head_dim: int, seqs: int, queries: int, **traits: Any) -> None:
    module = importlib.import_module("lmworks.kernels.inference.paged_attention_triton")
    pool = torch.zeros(4, 8, 16, head_dim, dtype=held)
    scales = torch.zeros(4, 8, 16) if held.itemsize == 1 else None
    numbers = torch.zeros(seqs + 1, dtype=torch.int32)
    metadata = AttentionMetadata(torch.zeros(seqs, 128, dtype=torch.int32), numbers[1:], numbers, queries)
    q = torch.zeros(seqs * queries, 32, head_dim, dtype=BF16)
    # The interpreter's one multiprocessor never splits: cut up as on 132.
    cache = LayerCache(pool, pool, scales, scales)
    config = replace(module.choose_config(q, cache, metadata, invariant=False), splits=3 if queries <= 16 else 1)
    module.launch(q, cache, metadata, config=config, **traits)


def paged(held: torch.dtype, head_dim: int) -> LayerCache:
    pool = torch.zeros(4, 8, 16, head_dim, dtype=held)
    scales = torch.zeros(4, 8, 16) if held.itemsize == 1 else None
    return LayerCache(pool, pool, scales, scales)


def attend_shared(held: torch.dtype, head_dim: int = 128) -> None:
    module = importlib.import_module("lmworks.kernels.inference.paged_attention_triton")
    numbers, tables = torch.zeros(65, dtype=torch.int32), torch.zeros(64, 128, dtype=torch.int32)
    shared = SharedPrefixes(numbers[1:], numbers[1:], numbers[:33])
    metadata = AttentionMetadata(tables, numbers[1:], numbers, 1, shared)
    module.launch(torch.zeros(64, 32, head_dim, dtype=BF16), paged(held, head_dim), metadata)


def long_prompt(held: torch.dtype, head_dim: int) -> None:
    module = importlib.import_module("lmworks.kernels.inference.prefill_attention_triton")
    numbers, tables = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 128, dtype=torch.int32)
    metadata = AttentionMetadata(tables, numbers[1:], numbers, 700, None, numbers, 2048)
    q = torch.zeros(1400, 32, head_dim, dtype=BF16)
    module.launch(q, paged(held, head_dim), metadata, torch.zeros_like(q))


def latent(held: torch.dtype, seqs: int, queries: int, invariant: bool = False) -> None:
    """DeepSeek-V2-Lite's 16 heads over vectors of 512 and 64."""
    module = importlib.import_module("lmworks.kernels.inference.latent_attention_triton")
    pool = torch.zeros(4, 1, 16, 576, dtype=held)
    scales = torch.zeros(4, 1, 16) if held.itemsize == 1 else None
    numbers = torch.zeros(seqs + 1, dtype=torch.int32)
    metadata = AttentionMetadata(torch.zeros(seqs, 128, dtype=torch.int32), numbers[1:], numbers, queries)
    q, cache = torch.zeros(seqs * queries, 16, 576, dtype=BF16), LayerCache(pool, pool, scales, scales)
    config = module.choose_config(q, cache, metadata, invariant)
    if not invariant and queries == 1:
        config = replace(config, splits=3)
    module.launch(q, cache, metadata, rank=512, scale=0.1, invariant=invariant, config=config)
    slots = torch.zeros(5, dtype=torch.int64)
    writer = importlib.import_module("lmworks.kernels.inference.kv_cache_write_triton")
    writer.launch_vectors(cache, torch.zeros(5, 1, 576, dtype=BF16), slots)


def experts(
    tokens: int,
    *,
    held: torch.dtype | None = None,
    invariant: bool = False,
    dtype: torch.dtype = BF16,
    **routing: Any,
) -> None:
    module = importlib.import_module("lmworks.kernels.inference.experts_triton")
    x, logits = torch.zeros(tokens, 2048, dtype=dtype), torch.zeros(tokens, 128, dtype=dtype)
    gate, up = (torch.zeros(128, 768, 2048, dtype=held or dtype) for _ in range(2))
    down = torch.zeros(128, 2048, 768, dtype=held or dtype)
    shared, bias = (x, torch.zeros(128)) if routing else (None, None)
    scales = () if held is None else (torch.zeros(128, 1536), torch.zeros(128, 2048))
    weights = module.ExpertWeights(gate, up, down, *scales)
    module.experts(x, logits, weights, module.Routing(8, **routing), bias, shared, invariant)


def unpermute() -> None:
    module = importlib.import_module("lmworks.kernels.training.permute_triton")
    rows, weights, back = torch.zeros(512, 2048, dtype=BF16), torch.zeros(64, 8, dtype=BF16), torch.arange(512)
    grad = module.forward(rows, weights, back, 8)
    module.backward(grad, rows, weights, back, 8, torch.empty_like(rows), torch.empty_like(weights))


def store(held: torch.dtype) -> None:
    module = importlib.import_module("lmworks.kernels.inference.kv_cache_write_triton")
    pool, scales = torch.zeros(4, 8, 16, 128, dtype=held), torch.zeros(4, 8, 16)
    turn = (torch.zeros(5, 1, 128), torch.zeros(5, 1, 128))
    norm = torch.zeros(128, dtype=BF16)
    qkv, slots = torch.zeros(5, 48 * 128, dtype=BF16), torch.zeros(5, dtype=torch.int64)
    module.launch(qkv, 32, 8, norm, norm, 1e-6, turn, LayerCache(pool, pool, scales, scales), slots)


def product(kind: str, rows: int, gate: bool = False, channels: int = 4096) -> None:
    few = importlib.import_module("lmworks.kernels.inference.linear_triton")
    x, inputs = torch.zeros(rows, 1024, dtype=BF16), 1024
    if kind == "int4":
        words, scale = torch.zeros(channels, inputs // 8, dtype=torch.int32), torch.zeros(channels, 8, dtype=BF16)
        importlib.import_module("lmworks.kernels.inference.quantized_triton").int4_linear(x, words, scale, gate)
    elif kind == "int8":
        q, scale = torch.zeros(channels, inputs, dtype=torch.int8), torch.zeros(channels)
        importlib.import_module("lmworks.kernels.inference.quantized_triton").int8_linear(x, q, scale, gate)
    elif kind == "fp8":
        weight = torch.zeros(channels, inputs, dtype=FP8)
        few.fp8_linear(x.to(FP8), torch.zeros(rows), weight, torch.zeros(channels), BF16, gate)
    elif kind.startswith("fixed"):
        weight = torch.zeros(channels, inputs, dtype=BF16)
        fixed = importlib.import_module("lmworks.kernels.inference.linear_triton")
        fixed.launch_batch_invariant(x, weight, None, fp32_out=kind == "fixed-wide")
    else:
        few.linear(x, torch.zeros(channels, inputs, dtype=BF16), gate)


def sample() -> None:
    logits, table, slots = torch.zeros(4, 5000, dtype=BF16), torch.zeros(9, 4), torch.zeros(4, dtype=torch.int64)
    rows = RowParams(table[:, 0], torch.zeros(9, dtype=torch.int64), slots, slots)
    masks = torch.zeros(4, 157, dtype=torch.int32)
    module = importlib.import_module("lmworks.kernels.inference.gumbel_sample_triton")
    module.launch(logits, logits, rows, True, torch.zeros(4), masks)
    importlib.import_module("lmworks.kernels.inference.top_k_top_p_triton").launch(
        logits, TruncationParams(*table.unbind(1), slots)
    )


def norm(hidden: int, stream: torch.dtype) -> None:
    module = importlib.import_module("lmworks.kernels.rms_norm_triton")
    x, delta, weight = torch.zeros(64, hidden, dtype=stream), torch.zeros(64, hidden, dtype=BF16), torch.zeros(hidden)
    total, normed, r = module.forward(x, delta, weight, 1e-5)
    module.backward(normed, total, weight, r)


def swiglu(ffn: int) -> None:
    module, x = importlib.import_module("lmworks.kernels.swiglu_triton"), torch.zeros(64, ffn, dtype=BF16)
    module.backward(module.forward(x, x), x, x)


def swiglu_fp8(ffn: int) -> None:
    module, x = importlib.import_module("lmworks.kernels.training.swiglu_fp8_triton"), torch.zeros(64, ffn, dtype=BF16)
    _, scale = module.forward(x, x)
    module.backward(x, x, x, scale)


def rope(heads: int, kv_heads: int, head_dim: int) -> None:
    q, k = (torch.zeros(2, 16, n, head_dim, dtype=BF16) for n in (heads, kv_heads))
    table = torch.zeros(16, 1, head_dim)
    importlib.import_module("lmworks.kernels.rope_triton").launch(q, k, table, table, inverse=True)


def flash(head_dim: int, *, group: int = 1, window: int = 0, packed: bool = False, dtype: torch.dtype = BF16) -> None:
    """Forward and backward, 4 sequences of 1024 positions."""
    q = torch.zeros(4, 1024, 8, head_dim, dtype=dtype)
    k = torch.zeros(4, 1024, 8 // group, head_dim, dtype=dtype)
    edges = torch.zeros(4, 1024, dtype=torch.int32) if packed else None
    forward = importlib.import_module("lmworks.kernels.training.flash_forward_triton")
    out, lse = forward.launch(q, k, k, edges, window, 0.1)
    backward = importlib.import_module("lmworks.kernels.training.flash_backward_triton")
    backward.launch(q, q, k, k, out, lse, edges, edges, window, 0.1)


def loss(vocab: int) -> None:
    """With a gradient (bf16 has a kernel of its own), and cut over ranks; rows are filled up to 64 logits."""
    module = importlib.import_module("lmworks.kernels.training.cross_entropy_triton")
    logits, targets = torch.zeros(4, -(-vocab // 64) * 64, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    module.loss_in_place(logits.half(), targets, True, vocab)
    module.row_sums(logits, targets)
    module.gradient_in_place(logits, targets, torch.zeros(4))


def eight_bits() -> None:
    module = importlib.import_module("lmworks.kernels.training.float8_triton")
    x = torch.zeros(4096, 4096, dtype=BF16)
    values, scales = module.quantize_rows(x, FP8, True)
    module.dequantize(values, scales, BF16)
    module.quantize(x, FP8)
    module.quantize(x, torch.float8_e5m2, True, transposed=True)


def few_in_eight_bits() -> None:
    importlib.import_module("lmworks.kernels.training.float8_triton").quantize_rows(
        torch.zeros(5, 4096, dtype=BF16), FP8
    )


def adamw(size: int, low: bool, states: torch.dtype) -> None:
    module = importlib.import_module("lmworks.kernels.training.adamw")
    weight, states_like, scalar = torch.zeros(size, dtype=BF16), torch.zeros(size, dtype=states), torch.zeros(())
    bits = torch.zeros(size, dtype=torch.int16) if low else None
    slot = module.ParamState(weight, weight, scalar, 2**62, states_like, states_like, bits)
    rule = module.AdamWConfig(1e-3, stochastic=not low)
    module.adamw([slot], rule, grad_scale=scalar, found_inf=scalar, implementation="triton")


PASSES: dict[str, Callable[[], None]] = {  # over memory, with backward passes
    **{f"norm-{hidden}": lambda hidden=hidden: norm(hidden, BF16) for hidden in (64, 768, 4096, 8192)},
    "norm-fp32-stream": lambda: norm(4096, torch.float32),
    "swiglu": lambda: swiglu(14336),
    "swiglu-fp8": lambda: swiglu_fp8(14336),
    "fp8": eight_bits,
    "rope": lambda: rope(32, 8, 128),
    "rope-64": lambda: rope(12, 12, 64),
}
CASES: dict[str, Callable[[], None]] = {
    **PASSES,
    "norm-fp32-stream-16384": lambda: norm(16_384, torch.float32),
    "unpermute": unpermute,
    "adamw": lambda: adamw(2**16, True, torch.float32),
    "adamw-stochastic": lambda: adamw(2**16, False, BF16),
    "adamw-small": lambda: adamw(100, True, BF16),
    "decode": lambda: attend(BF16, 128, 64, 1),
    "decode-fp8": lambda: attend(FP8, 128, 64, 1),
    "decode-int8": lambda: attend(torch.int8, 64, 64, 1),
    "guesses": lambda: attend(BF16, 128, 4, 5),
    "guesses-fp8": lambda: attend(FP8, 128, 4, 5),
    "guesses-fp8-16": lambda: attend(FP8, 128, 4, 16),
    "decode-fp8-heads-of-16": lambda: attend(FP8, 16, 64, 1),
    "prompt": lambda: attend(BF16, 128, 4, 600),
    "prompt-fp8": lambda: attend(FP8, 128, 4, 600),
    "decode-soft-cap-sinks": lambda: attend(BF16, 128, 64, 1, softcap=50.0, sinks=torch.zeros(32, dtype=BF16)),
    "prompt-soft-cap-sinks": lambda: attend(BF16, 128, 4, 600, softcap=50.0, sinks=torch.zeros(32, dtype=BF16)),
    **{f"decode-shared-{TYPES[held]}": lambda held=held: attend_shared(held) for held in (BF16, FP8, torch.int8)},
    **{f"long-prompt-{TYPES[held]}-{width}": lambda held=held, width=width: long_prompt(held, width)
       for held in (BF16, FP8, torch.int8) for width in (64, 128)},
    **{f"latent-{TYPES[held]}": lambda held=held: latent(held, 4, 1) for held in (BF16, FP8, torch.int8)},
    **{f"latent-prompt-{TYPES[held]}": lambda held=held: latent(held, 2, 300) for held in (BF16, FP8, torch.int8)},
    "latent-invariant": lambda: latent(BF16, 4, 1, invariant=True),
    **{f"experts-{tokens}": lambda tokens=tokens: experts(tokens) for tokens in (1, 8, 64, 256, 1024, 8192)},
    **{f"experts-{TYPES[held]}-{tokens}": lambda held=held, tokens=tokens: experts(tokens, held=held)
       for held in (FP8, torch.int8) for tokens in (1, 64, 8192)},
    "experts-invariant": lambda: experts(8, invariant=True),
    "experts-fp32": lambda: experts(64, dtype=torch.float32),
    "experts-groups": lambda: experts(4, sigmoid=True, scale=2.5, groups=8, top_groups=4),
    "store-fp8": lambda: store(FP8),
    "store-int8": lambda: store(torch.int8),
    **{f"{kind}-{rows}": lambda kind=kind, rows=rows: product(kind, rows)
       for kind in ("bf16", "int8", "int4", "fp8") for rows in (1, 2, 64)},
    **{f"{kind}-gate-{rows}": lambda kind=kind, rows=rows: product(kind, rows, gate=True)
       for kind in ("bf16", "int8", "int4", "fp8") for rows in (1, 2)},
    **{f"{kind}-{rows}-of-{width}": lambda kind=kind, rows=rows, width=width: product(kind, rows, channels=width)
       for kind in ("bf16", "int8", "int4", "fp8") for rows in (2, 16, 64) for width in (1024, 16_384, 65_536)},
    "fp8-rows": few_in_eight_bits,
    "fixed-1": lambda: product("fixed", 1),
    "fixed-wide-1": lambda: product("fixed-wide", 1),
    "sample": sample,
    "flash-256": lambda: flash(256),
    "flash-80-window": lambda: flash(80, window=300),
    "flash-fp32": lambda: flash(128, group=4, packed=True, dtype=torch.float32),
}  # fmt: skip


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Of a thread: where registers are spilt to."""
    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r" STACK:(\d+) ", told)))


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_a_gpu(case: str, compiled: list[Any]) -> None:
    CASES[case]()
    assert compiled
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert kernel.asm["cubin"]


def test_no_uninitialised_register_is_read(compiled: list[Any], tmp_path: Path) -> None:
    """ptxas 12.8 took bytes of pairs of e5m2 from the pointer to a stack that there is not: half of all numbers."""
    swiglu_fp8(14336)
    for kernel in compiled:
        (tmp_path / "cubin").write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(tmp_path / "cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert stack_bytes(kernel, tmp_path) == 0
        assert len(re.findall(r"\bR1\b", told)) <= 1  # it is set when a kernel begins


@pytest.mark.parametrize("case", ["decode-fp8", "decode-int8", "guesses-fp8"])
def test_8_bit_cache_is_loaded_in_wide_words(case: str, compiled: list[Any], tmp_path: Path) -> None:
    """Values lie turned for the product: a compiler that may take single bytes does, and keeps them in registers."""
    CASES[case]()
    (kernel,) = compiled
    assert not re.search(r"ld\.shared\.[a-z]?8\b|ld\.shared\.b8", kernel.asm["ptx"])
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in kernel.asm["ptx"]
    assert stack_bytes(kernel, tmp_path) == 0


MOVES = r"\s(ld|st|atom|red)\.(?!param)|\scp\.async\."
DECODING = ("norm-4096", "bf16-gate-1", "bf16-2", "int8-1", "fp8-rows", "fp8-2", "fixed-1", "store-fp8", "decode",
            "swiglu", "sample", "experts-1", "experts-8", "latent-bf16")  # fmt: skip


@pytest.mark.parametrize("case", DECODING)
def test_early_launched_kernels_wait_before_memory_access(case: str, compiled: list[Any]) -> None:
    CASES[case]()
    kernels = [kernel for kernel in compiled if kernel.metadata.launch_pdl]
    assert kernels
    for kernel in kernels:
        before, waited, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert waited
        assert "griddepcontrol.launch_dependents" in after
        assert not re.search(MOVES, before)
        assert re.search(MOVES, after)


@pytest.mark.parametrize("case", PASSES)
def test_elementwise_kernels_load_16_bytes_without_spills(case: str, compiled: list[Any], tmp_path: Path) -> None:
    PASSES[case]()
    for kernel in compiled:
        assert stack_bytes(kernel, tmp_path) == 0
        loads = re.findall(r"ld\.global[.a-z0-9_:]*", kernel.asm["ptx"])
        single = 3 if case == "swiglu-fp8" else 1  # numbers: r of a row, scales of tensors
        assert sum(".v4" in load for load in loads) >= len(loads) - single


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("pattern", "spilt"), [({"group": 4}, 0), ({"window": 300}, 96), ({"packed": True}, 96)], ids=str
)
def test_flash_attention_uses_tensor_cores_without_spills(
    head_dim: int, pattern: dict[str, Any], spilt: int, compiled: list[Any], tmp_path: Path
) -> None:
    """The heads that are tuned for: no spilt register (or few, where a window or a document has an edge), products on
    the tensor cores, tiles by the copy engine."""
    flash(head_dim, **pattern)
    assert len(compiled) == 3
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert stack_bytes(kernel, tmp_path) <= spilt
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert "mma.sync" not in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor.4d" in kernel.asm["ptx"]


def test_fp8_sums_are_promoted_every_step(compiled: list[Any]) -> None:
    """What they keep of a sum of fp8 is too little for a long one: it goes on in fp32 registers, of which a tile of
    128 channels and 16 rows has 8 in each of 256 threads."""
    module = importlib.import_module("lmworks.kernels.inference.linear_triton")
    weight, x = torch.zeros(28_672, 512, dtype=torch.uint8).view(FP8), torch.zeros(2, 512).to(FP8)
    module.fp8_linear(x, torch.zeros(2), weight, torch.zeros(28_672), BF16)
    [kernel] = compiled
    assert "wgmma" in kernel.asm["ptx"]
    assert kernel.asm["ptx"].count("add.f32") >= 8


@pytest.mark.parametrize(("vocab", "each"), [(128_256, 4), (50_257, 2)])
def test_loss_kernel_loads_16_bytes(vocab: int, each: int, compiled: list[Any], tmp_path: Path) -> None:
    """A row of any vocabulary: 32 or 16 logits of each of 256 threads, read in both passes and written in one."""
    loss(vocab)
    for kernel, loads, stores in zip(compiled, (2, 1, 1), (2, 0, 1), strict=True):  # the first writes rows of zeros too
        assert stack_bytes(kernel, tmp_path) == 0
        assert kernel.asm["ptx"].count("ld.global.v4") == loads * each
        assert kernel.asm["ptx"].count("st.global.v4") == stores * each


@pytest.mark.parametrize(("vocab", "again", "held"), [(128_256, 19, 13), (50_257, 0, 13), (32_000, 0, 8)])
def test_one_pass_loss_keeps_row_in_registers(
    vocab: int, again: int, held: int, compiled: list[Any], tmp_path: Path
) -> None:
    """Blocks of 512 threads × 16 bytes: those held are loaded before the loop and in it, the others twice in it."""
    module = importlib.import_module("lmworks.kernels.training.cross_entropy_triton")
    logits, targets = torch.zeros(4, -(-vocab // 64) * 64, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    module.loss_in_place(logits, targets, True, vocab)
    [kernel] = compiled
    assert stack_bytes(kernel, tmp_path) <= 32  # none with Triton 3.6
    assert len(re.findall(r"ld\.global\S*\.v4\.", kernel.asm["ptx"])) == 2 * (again + held)
    assert len(re.findall(r"st\.global\S*\.v4\.", kernel.asm["ptx"])) == again + held
