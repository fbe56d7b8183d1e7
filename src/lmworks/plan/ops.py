"""The op list of one micro-batch: the kernels that the model's code runs and the tensors it saves, op by op.

One list with three readers: `step/` prices its kernels, `memory/` sums the saved activations, and its GEMMs add up to
`flops`. It follows `model/gpt.py` and `training/cross_entropy.py` line by line as PyTorch runs them eagerly; tests
compare saved bytes, GEMMs and memory traffic with what PyTorch does.

Widths are elements per token. Weights and the residual stream are fp32 (4 bytes), or bf16 with bf16 weights. Under
autocast GEMMs, attention and activations are `width` = 2 bytes wide, and a linear layer casts inputs of 4 bytes.

The ops are those of one rank: its heads and its part of the MLP and of the vocabulary under tensor parallelism, its
positions between these under sequence parallelism, its positions everywhere under context parallelism. Degrees and
batch may be numpy arrays, one element per candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..spec import ModelSpec, RunSpec
from ..spec.layout import SPLIT_BACKWARD
from .case import Case, Number
from .flops import keys_per_query
from .software import EAGER, Software, software_of

# As in kernels/training/cross_entropy.py, which a test compares.
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
CHUNK_BYTES_IN_PLACE = 2**29
CHUNK_ROW_MULTIPLE, FEW_CHUNKS = 256, 16
ALIGNED, VOCAB_MULTIPLE = 8, 64
UNFUSED_RECOMPUTE = (
    "selective",
    "mlp",
    "budget",
)  # policies that save single outputs inside a block


def device_of(spec: RunSpec) -> str:
    """cpu or cuda, whose kernels save different tensors: as the spec says, else by the named accelerator."""
    if spec.cluster.device != "auto":
        return spec.cluster.device
    return "cpu" if spec.cluster.gpu == "auto" else "cuda"


@dataclass(frozen=True)
class Kernel:
    """One kernel, launched `count` times.

    kind: 'gemm' (shape m, k, n), 'attention' and 'attention_backward' (shape seq, head_dim), or a pass over memory:
    'stream' (contiguous), 'strided' (a row of a table for every head, as rotary embedding reads them, or a sum over
    tokens), 'widen' (a cast from 2 bytes to 4), 'exp' (silu, softmax) and 'tanh' (gelu), which arithmetic bounds on a
    CPU, or 'optimizer'.
    """

    kind: str
    bytes: Number = 0.0  # read and written
    flops: Number = 0.0
    shape: tuple[Any, ...] = ()  # of numbers
    count: Number = 1.0
    bf16_only: bool = False  # stays in 16 bits under fp8


@dataclass(frozen=True)
class Op:
    name: str
    part: str  # its line of the step-time sheet
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    saved: tuple[Number, ...] = ()  # bytes of each saved tensor
    saved_selective: tuple[
        Number, ...
    ] = ()  # and of those kept under selective recompute: results of products and of attention
    indices: Number = 0.0  # further saved bytes of integer tensors
    copies: Number = 1  # of all these tensors: one per expert
    core_attention: Number = 0.0  # bytes of `saved` that recompute of core attention frees
    transient: Number = (
        0.0  # bytes that the forward pass makes and frees again, its input included where nobody keeps it
    )


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank."""

    model: ModelSpec
    batch: Any  # sequences
    seq: int
    dtype: str = "fp32"
    device: str = "cpu"
    documents: bool = False  # attention is masked by document
    tp: Any = 1
    sp: bool = False
    cp: Any = 1
    ep: Any = 1
    software: Software = EAGER
    no_epilogue_fusion: bool = False  # recompute, or a schedule, tells apart what the layers of a block compute

    @classmethod
    def of(cls, spec: RunSpec, device: str) -> Self:
        data, layout = spec.data, spec.parallel
        return cls(
            spec.model,
            data.micro_batch,
            data.seq,
            spec.precision.dtype,
            device,
            data.document_mask,
            layout.tp,
            layout.sp,
            layout.cp,
            layout.ep,
            software_of(spec),
            layout.recompute in UNFUSED_RECOMPUTE or layout.schedule in SPLIT_BACKWARD,
        )

    @classmethod
    def of_case(cls, case: Case) -> Self:
        work = cls(case.model, case.micro_batch, case.seq, case.dtype, "cuda", software=case.software)
        apart = case.recompute in UNFUSED_RECOMPUTE or case.schedule in SPLIT_BACKWARD
        return replace(work, tp=case.tp, sp=case.sp, cp=case.cp, ep=case.ep, no_epilogue_fusion=apart)

    @functools.cached_property
    def tokens(self) -> Any:
        """Positions of this rank inside tensor-parallel regions."""
        return self.batch * self.seq // self.cp

    @property
    def sp_tokens(self) -> Any:
        """Positions of this rank between tensor-parallel regions, sharded under sequence parallelism."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def heads(self) -> Any:
        return self.model.heads // self.tp

    @property
    def q_width(self) -> Any:
        return self.model.q_dim // self.tp

    @property
    def kv_width(self) -> Any:
        """At least one head: with more ranks than KV heads, heads are replicated."""
        return np.maximum(self.model.kv_dim // self.tp, self.model.head_dim)

    @property
    def vocab(self) -> Any:
        return self.model.vocab // self.tp

    @functools.cached_property
    def logit_columns(self) -> Any:
        """Logits per token: our loss pads a vocabulary that tensor cores cannot use."""
        if self.device == "cpu" or self.width == 4 or self.software.loss != "chunked":
            return self.vocab
        odd = np.not_equal(self.vocab % ALIGNED, 0) & np.equal(self.tp, 1)
        return np.where(odd, -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, self.vocab)[()]

    @property
    def width(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def is_16_bit(self) -> bool:
        """GEMM inputs and outputs have 2 bytes."""
        return self.width == 2

    @property
    def cast(self) -> bool:
        """Every layer casts its input to 16 bits, as autocast does."""
        return self.is_16_bit and self.software.cast

    @property
    def cast_weights(self) -> bool:
        """Every layer casts its weight to 16 bits; casts to fp8 are part of the GEMM and not saved."""
        return self.cast and self.dtype != "fp8"

    @property
    def cast_share(self) -> Any:
        """Share of a block's weights that is cast to 16 bits."""
        if self.cast_weights or not self.routed.cast_weights:
            return float(self.cast_weights)
        routed = self.model.experts * self.model.mlp_matrix(self.model.expert_ffn)
        return routed / self.ep / (self.model.block_params - routed + routed / self.ep)

    @functools.cached_property
    def routed(self) -> Self:
        """The workload of routers and experts, which our trainer keeps in 16 bits under fp8."""
        without_fp8 = self.model.experts and self.dtype == "fp8" and not self.software.fp8_experts
        return replace(self, dtype="bf16") if without_fp8 else self

    @property
    def rematerialized(self) -> bool:
        """A compiled block does not save the outputs of norms and activations that enter fp8 GEMMs.

        They are recomputed in the pass that casts them again for the weight gradient.
        """
        return self.dtype == "fp8" and self.software.graph

    @property
    def stream(self) -> int:
        """Bytes per element of the residual stream."""
        return self.software.stream

    @functools.cached_property
    def chunk_rows(self) -> Any:
        """Tokens per chunk of logits."""
        width = self.width // (2 if self.software.fp32_head else 1)  # twice as many rows
        return chunk_rows(self.tokens, self.logit_columns, self.device, width, self.in_place)

    @functools.cached_property
    def head_gradient(self) -> Any:
        """Bytes per element of the head's gradient while it is summed: fp32 over many chunks, else as stored."""
        few = FEW_CHUNKS if self.in_place and not self.software.fp32_head else 1
        many = np.greater(self.tokens, few * self.chunk_rows)
        return np.where(many, 4, self.software.gradients)[()]

    @property
    def in_place(self) -> bool:
        return self.device == "cuda" and self.software.in_place

    @property
    def epilogue_fusion(self) -> Any:
        """GELU, its gradient and the residual add after the MLP are GEMM epilogues (model/training_fusion.py).

        Each then moves one tensor beside the GEMM's own: GELU writes its output, its gradient reads GELU's input, and
        an add reads its addend.
        """
        plain = (
            self.software.epilogue_fusion
            and self.model.mlp == "gelu"
            and self.dtype != "fp8"
            and not self.no_epilogue_fusion
        )
        return np.equal(self.tp, 1) & (plain and self.device == "cuda")

    @property
    def attention(self) -> str:
        """'fused' saves no scores; 'scores' saves all, as the reference does.

        PyTorch's fused CPU attention takes a mask of 2 or 4 dimensions; ALiBi's (heads, seq, seq) is its math path.
        """
        alibi = self.model.positions == "alibi" and not self.documents and self.device == "cpu"
        return "scores" if self.model.attention == "reference" or alibi else "fused"


def chunk_rows(tokens: Number, columns: Number, device: str, width: int, in_place: bool) -> Any:
    """Tokens per chunk of logits of `width` bytes; large chunks are made nearly equal."""
    in_place = in_place and device == "cuda"
    limit = CHUNK_BYTES_IN_PLACE // width if in_place else CHUNK_LOGITS[device]
    rows = np.minimum(tokens, np.maximum(1, limit // columns))
    if not in_place:
        return rows
    alike = -(-tokens // -(-tokens // rows))
    return np.where(
        (alike < CHUNK_ROW_MULTIPLE) | (alike >= tokens), alike, -(-alike // CHUNK_ROW_MULTIPLE) * CHUNK_ROW_MULTIPLE
    )[()]


def stream(elements: Number, *, kind: str = "stream", count: Number = 1) -> Kernel:
    """A memory-bound kernel that reads and writes `elements` × 4 bytes in all."""
    return Kernel(kind, bytes=4 * elements, count=count)


def without_fp8(load: Workload, ops: Iterable[Op]) -> list[Op]:
    """Ops of a router and its experts: in fp8 only in code bases that support it."""
    if load.software.fp8_experts:
        return list(ops)

    def bf16(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(replace(kernel, bf16_only=True) for kernel in kernels)

    return [replace(op, forward=bf16(op.forward), backward=bf16(op.backward)) for op in ops]


def gemm(m: Any, k: Any, n: Any, count: Number = 1) -> Kernel:
    return Kernel("gemm", flops=2.0 * m * k * n, shape=(m, k, n), count=count)


def linear(name: str, load: Workload, inputs: Any, outputs: Any, bias: bool = False) -> Op:
    """y = x·Wᵀ; backward: grad·W, gradᵀ·x, and a sum over tokens for the bias. Saved under selective recompute only."""
    t, w = load.tokens, load.width
    backward = [gemm(t, outputs, inputs), gemm(outputs, t, inputs)]
    if bias:
        backward.append(Kernel("strided" if load.device == "cuda" else "stream", bytes=t * outputs * w))
    forward = [gemm(t, inputs, outputs)]
    if load.cast_weights:  # once a micro-batch, and its gradient back
        forward.append(Kernel("stream", bytes=6.0 * inputs * outputs))
        backward.append(Kernel("widen", bytes=6.0 * inputs * outputs))
    return Op(name, "matmul", tuple(forward), tuple(backward), saved_selective=(t * outputs * w,))


def normalise(load: Workload, x: Number) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of a norm over x elements: one each way, but for RMSNorm on a CPU, made of small ops.

    On a GPU the weight gradient is a kernel of its own, which reads both inputs again.
    """
    x = x * load.stream / 4
    if load.device == "cuda":
        return [stream(2 * x)], [stream(3 * x), stream(2 * x)]
    if load.model.norm == "layer":
        return [stream(2 * x)], [stream(3 * x)]
    return [stream(2 * x, count=3), stream(x)], [stream(3 * x, count=2), stream(2 * x, count=4), stream(x, count=2)]


def norm(name: str, load: Workload, readers: int) -> Op:
    """Normalise the residual stream for `readers` linear layers.

    Saved: the output once (fp32), or one cast of it per reader; 1/σ, and LayerNorm's mean. Its input is saved by the
    op that made it.
    """
    t, x, whole = load.sp_tokens, load.sp_tokens * load.model.hidden, load.tokens * load.model.hidden
    results = [2 * x] * readers if load.cast else [load.stream * x] * (readers > 0)
    if np.any(load.tp > 1):  # one tensor enters the region, cast before it does
        entering = [load.width * whole, *[0] * len(results[1:])]
        results = [np.where(load.tp > 1, one, many) for one, many in zip(entering, results, strict=False)]
    figure = load.stream if load.device == "cpu" else 4  # 1/σ, or a mean; those of our RMSNorm are always fp32
    saved = [*results, *([t * figure] * 2 if load.model.norm == "layer" else [4 * t])]
    if load.model.norm == "layer" and load.software.fp32_head and load.stream == 2 and not readers:
        saved.append(6 * x)  # before the loss nothing fuses it: autocast had its input and its result in fp32
    forward, backward = normalise(load, x)
    if load.cast:
        forward.append(stream(1.5 * x, count=readers))
        backward.append(stream(1.5 * x, kind="widen", count=readers))
    added = 3 * x * load.stream / 4  # gradients of the readers
    backward.append(stream(added, count=max(0, readers - 1)))
    freed = 4 * x * ((load.model.norm == "rms" and load.device == "cpu") + load.cast)  # x², and what was cast
    return Op(name, "norms", tuple(forward), tuple(backward), tuple(saved), transient=freed)


def residual(name: str, load: Workload, inner: bool = False) -> Op:
    """x + f(x): the sum is saved for the next norm; backward adds the two gradients."""
    x = load.sp_tokens * load.model.hidden
    passed = stream(3 * x * load.stream / 4)
    back = [passed] + ([stream(1.5 * x)] if load.cast else [])
    forward = stream(np.where(load.epilogue_fusion & (not inner), 1, 3)[()] * x * load.stream / 4)
    return Op(name, "residual", (forward,), tuple(back), saved=(load.stream * x,), transient=load.width * x)


def head_norm(name: str, load: Workload, heads: Any) -> Op:
    """RMSNorm over each head. Saved: its input, and 1/σ of every head."""
    x = load.tokens * heads * load.model.head_dim
    forward, backward = normalise(load, x)
    return Op(name, "norms", tuple(forward), tuple(backward), saved=(load.width * x, 4 * load.tokens * heads))


def rotary(name: str, load: Workload, width: Any) -> Op:
    """x·cos + swap(x)·sin in fp32: two products with a table per position, a cat of swapped halves, a sum.

    Only the tables are saved, which all layers share; backward is the same four kernels.
    """
    x = load.tokens * width
    passes = [stream(2 * x, kind="strided", count=3), stream(3 * x)]
    if load.is_16_bit:  # 2 bytes in and out, fp32 within
        passes = [stream(1.5 * x, kind="strided", count=2), stream(x, kind="strided"), stream(3 * x), stream(1.5 * x)]
    freed = (14 if load.is_16_bit else 12) * x + load.width * x * (not load.model.qk_norm)
    return Op(name, "rotary", tuple(passes), tuple(passes), transient=freed)


def attention(load: Workload) -> Op:
    """softmax(q·kᵀ)·v. Fused: saves q, k, v, the output and a log-sum-exp per head and token."""
    m, t, w = load.model, load.tokens, load.width
    result = t * load.q_width * w
    inputs = [t * width * w for width in (load.q_width, load.kv_width, load.kv_width)]
    flops = 4.0 * t * load.q_width * keys_per_query(load.seq, m.sliding_window)
    shape = (load.seq, m.head_dim)
    forward, backward = [], []
    if load.attention == "scores":
        scores = t * load.seq * load.heads
        product = 4.0 * t * load.q_width * load.seq  # no causal skipping
        forward = [gemm(t * load.heads, m.head_dim, load.seq), gemm(t * load.heads, load.seq, m.head_dim)]
        forward += [stream(2 * scores, count=2), stream(2 * scores, kind="exp")]
        backward = [Kernel("attention_backward", flops=2 * product, shape=shape), stream(3 * scores, count=2)]
        inner = w if m.attention == "reference" else 4  # SDPA's math path computes in fp32
        saved = [4 * scores, *[t * load.q_width * inner] * 3, result]  # k and v repeated for every head
        if load.is_16_bit and m.attention == "reference":
            saved.append(2 * scores)
        dear = scores * inner, t * load.q_width * inner
        return Op("attention", "attention", tuple(forward), tuple(backward), tuple(saved), dear)
    forward = [Kernel("attention", flops=flops, shape=shape)]
    backward = [
        Kernel("attention_backward", flops=2.5 * flops, shape=shape)
    ]  # 5 GEMMs against 2: scores are recomputed
    # Under context parallelism the output is saved twice: as merged, and as the next GEMM reads it.
    sums = 4 * t * load.heads
    saved = [*inputs, result, sums, result * np.greater(load.cp, 1)]
    mask = load.seq**2 * (load.batch if load.documents else 1)
    if load.device == "cpu" and m.positions == "alibi" and load.is_16_bit:  # every layer casts its own
        saved.append(load.heads * mask * w)
    elif load.device == "cpu" and m.positions != "alibi" and (m.sliding_window or load.documents):
        # SDPA turns the Boolean mask into a float one in every layer: (seq, seq), one a sequence with documents.
        saved.append(mask * w)
        forward.append(stream(1.25 * mask))
    dear = result, sums
    return Op("attention", "attention", tuple(forward), tuple(backward), tuple(saved), dear)


def activation(load: Workload, width: Any, tokens: Any, count: Any = 1) -> Op:
    """SwiGLU saves gate, silu(gate) and up; GELU saves its input; the next GEMM saves their output."""
    x = tokens * width * load.width / 4  # in units of 4 bytes
    if load.model.mlp == "gelu":
        there, back = (np.where(load.epilogue_fusion, 1, apart)[()] * x for apart in (2, 3))
        forward, backward = [stream(there, kind="tanh", count=count)], [stream(back, kind="tanh", count=count)]
        tensors = 1
    else:
        forward = [stream(2 * x, kind="exp", count=count), stream(3 * x, count=count)]
        backward = [stream(3 * x, count=2 * count), stream(3 * x, kind="exp", count=count)]
        tensors = 3
    saved = (4 * x,) * (tensors + 1)
    return Op(load.model.mlp, "activation", tuple(forward), tuple(backward), saved, copies=count)
