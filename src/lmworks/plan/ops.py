"""The op list of one micro-batch: the kernels that the model's code runs and the tensors it saves, op by op.

One list with three readers: `step/` prices its kernels, `memory/` sums the saved activations, and its GEMMs add up to
`flops`. `network` makes it from the components of the model (`spec/components.py`) with the cost rules of eager code
(`eager`) or of fused code (`fused`); tests compare saved bytes, GEMMs and memory traffic with what PyTorch does.

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

from ..spec import ModelSpec, RunSpec, components
from ..spec.layout import SPLIT_BACKWARD
from ..spec.lora import block_adapter_weights
from .case import Case, Number
from .passes import CROSS_ENTROPY, DIVERGENCE, head_of, teacher_shape
from .software import EAGER, Software, software_of

# As in kernels/training/cross_entropy.py, which a test compares.
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
CHUNKS_OF_LOGPROBS = 2  # that a chunk of log-probabilities would be, where a teacher is compared with
CHUNK_BYTES_IN_PLACE = 2**29
CHUNK_ROW_MULTIPLE, FEW_CHUNKS = 256, 16
ALIGNED, VOCAB_MULTIPLE = 8, 64
GEMM_ONLY = ("fp8", "fp4")  # formats of the operands of GEMMs: all else stays in 16 bits
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
    over_tokens: bool = False  # a GEMM that sums over tokens, as a weight's gradient does: k needs no alignment
    batched: bool = False  # `count` GEMMs of the heads of attention in one launch


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
    # Of a product in fp8 or fp4: whether a norm or an activation beside it, which can write that format, makes its
    # input, and the gradient of its output.
    input_from_kernel: bool = False
    gradient_from_kernel: bool = False
    core_attention: Number = 0.0  # bytes of `saved` that recompute of core attention frees
    for_weights: Number = 0.0  # of `saved`, what linear layers keep of its result, for the gradients of their weights
    transient: Number = (
        0.0  # bytes that the forward pass makes and frees again, its input included where nobody keeps it
    )


@dataclass(eq=False)
class Workload:
    """One micro-batch on one rank, and the sizes that follow from it."""

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
    cp_method: str = "ring"  # or "ulysses"
    no_epilogue_fusion: bool = False  # recompute, or a schedule, tells apart what the layers of a block compute
    head: str = CROSS_ENTROPY  # what follows the last norm
    teacher: ModelSpec | None = None  # of distillation
    adapters: tuple[components.Weight, ...] = ()  # of a block; where there are any, all other weights are frozen
    frozen_base: str = ""  # format of the frozen weights of linear layers

    def __post_init__(self) -> None:
        software = self.software
        self.tokens = self.batch * self.seq // self.cp  # positions of this rank inside tensor-parallel regions
        # And between tensor-parallel regions, where sequence parallelism shards them.
        self.sp_tokens = self.tokens // self.tp if self.sp else self.tokens
        self.vocab = self.model.vocab // self.tp
        self.width = 4 if self.dtype == "fp32" else 2  # bytes per element of GEMM inputs and outputs
        self.is_16_bit = self.width == 2
        self.stream = software.stream  # bytes per element of the residual stream
        # Every layer casts its input to 16 bits, as autocast does, and its weight; casts to fp8 are part of the GEMM
        # and not saved.
        self.cast = self.is_16_bit and software.cast
        self.cast_weights = self.cast and self.dtype not in GEMM_ONLY
        # A compiled block does not save the outputs of norms and activations that enter fp8 GEMMs. They are recomputed
        # in the pass that casts them again for the weight gradient.
        self.rematerialized = self.dtype in GEMM_ONLY and software.graph
        # Bytes per element of a saved GEMM input: Transformer Engine saves what it multiplied. Modelled.
        self.saved_width = 1 if self.dtype in GEMM_ONLY and software.fused_casts else self.width
        self.in_place = self.device == "cuda" and software.in_place  # the loss overwrites logits with gradients
        # GELU, its gradient and the residual add after the MLP are GEMM epilogues (model/training_fusion.py). Each then
        # moves one tensor beside the GEMM's own: GELU writes its output, its gradient reads GELU's input, and an add
        # reads its addend.
        fusible = software.epilogue_fusion and self.model.mlp == "gelu" and self.dtype not in GEMM_ONLY
        fusible = fusible and not self.no_epilogue_fusion and not self.frozen and self.device == "cuda"
        self.epilogue_fusion = np.equal(self.tp, 1) & fusible
        # Experts are products of one launch each (model/moe.py), of weights whose rows the copy engine can read.
        aligned = self.model.experts and not (self.model.hidden % 8 or self.model.expert_ffn % 8)
        self.grouped_experts = bool(software.grouped_experts and aligned and self.device == "cuda" and self.is_16_bit)
        # Logits per token: our loss pads a vocabulary that tensor cores cannot use.
        self.logit_columns = self.vocab
        if self.device == "cuda" and self.is_16_bit and software.loss == "chunked":
            odd = np.not_equal(self.vocab % ALIGNED, 0) & np.equal(self.tp, 1)
            self.logit_columns = np.where(odd, -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, self.vocab)[()]

    @classmethod
    def of(cls, spec: RunSpec, device: str) -> Self:
        data, layout = spec.data, spec.parallel
        return cls(
            spec.model,
            data.micro_batch * data.rows_per_example,
            data.seq,
            spec.precision.dtype,
            device,
            data.has_documents or spec.align.online,
            layout.tp,
            layout.sp,
            layout.cp,
            layout.ep,
            software_of(spec),
            layout.cp_method,
            layout.recompute in UNFUSED_RECOMPUTE or layout.schedule in SPLIT_BACKWARD,
            head_of(spec, spec.model),
            teacher_shape(spec),
            tuple(block_adapter_weights(spec.model, spec.lora, spec.adapters)),
            spec.lora.base,
        )

    @classmethod
    def of_case(cls, case: Case) -> Self:
        apart = case.recompute in UNFUSED_RECOMPUTE or case.schedule in SPLIT_BACKWARD
        sizes = case.model, case.micro_batch, case.seq, case.dtype, "cuda", False
        return cls(
            *sizes,
            case.tp,
            case.sp,
            case.cp,
            case.ep,
            case.software,
            case.cp_method,
            apart,
            case.head,
            case.teacher,
            case.adapters,
            case.frozen_base,
        )

    @property
    def frozen(self) -> bool:
        """Only adapters, and a scalar head, are trained."""
        return bool(self.adapters)

    def local(self, width: int, shard: components.Shard) -> Any:
        """Of `width` outputs per token, those of one tensor-parallel rank.

        Of KV heads at least one: with more ranks than heads, heads are replicated.
        """
        if shard == "replicated":
            return width
        return np.maximum(width // self.tp, width // self.model.kv_heads) if shard == "kv_heads" else width // self.tp

    @property
    def cast_share(self) -> Any:
        """Share of a block's weights that is cast to 16 bits."""
        if self.cast_weights or not self.routed.cast_weights:
            return float(self.cast_weights)
        routed = self.model.routed_params * self.model.expert_layers / self.model.layers
        return routed / self.ep / (self.model.block_params - routed + routed / self.ep)

    @functools.cached_property
    def routed(self) -> Self:
        """The workload of routers and experts, which our trainer keeps in 16 bits under fp8."""
        wide = self.model.experts and self.dtype in GEMM_ONLY and not self.software.fp8_experts
        return replace(self, dtype="bf16") if wide else self

    @functools.cached_property
    def chunk_rows(self) -> Any:
        """Tokens per chunk of logits."""
        if self.head == DIVERGENCE:
            return divergence_rows(self.tokens, self.logit_columns, self.device)
        width = self.width // (2 if self.software.fp32_head else 1)  # twice as many rows
        return chunk_rows(self.tokens, self.logit_columns, self.device, width, self.in_place)

    @functools.cached_property
    def head_gradient(self) -> Any:
        """Bytes per element of the head's gradient while it is summed: fp32 over many chunks, else as stored."""
        if self.head == DIVERGENCE:
            return 4
        few = FEW_CHUNKS if self.in_place and not self.software.fp32_head else 1
        many = np.greater(self.tokens, few * self.chunk_rows)
        return np.where(many, 4, self.software.gradients)[()]

    @property
    def attention(self) -> str:
        """'fused' saves no scores; 'scores' saves all, as the reference does.

        PyTorch's fused CPU attention takes a mask of 2 or 4 dimensions; ALiBi's (heads, seq, seq) is its math path.
        """
        alibi = self.model.positions == "alibi" and not self.documents and self.device == "cpu"
        return "scores" if self.backend == "reference" or alibi else "fused"

    @property
    def backend(self) -> str:
        return components.attention_backend(self.model, self.device)


def divergence_rows(tokens: Number, columns: Number, device: str) -> Any:
    """Tokens per chunk where logits of student and teacher are compared."""
    return np.minimum(tokens, np.maximum(1, CHUNK_LOGITS[device] // CHUNKS_OF_LOGPROBS // columns))


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


def weight_gradient(rows: Any, tokens: Any, columns: Any, count: Number = 1) -> Kernel:
    return replace(gemm(rows, tokens, columns, count), over_tokens=True)


def head_gemm(m: Any, k: Any, n: Any, heads: Number) -> Kernel:
    """Scores of attention, or their products with values."""
    return replace(gemm(m, k, n, heads), batched=True)


# --- expert load -----------------------------------------------------------------------------------------
# Modelled. A router trained with a balance loss spreads slots about as evenly as chance does. Every layer waits for its
# most loaded rank, and the last tile of an expert's rows is half full on average.

TILE = 128  # rows of one tile of a grouped GEMM; modelled
EULER = 0.5772  # Euler–Mascheroni constant


def fullest(slots: Number, bins: Number) -> Number:
    """Largest load of `bins` over their mean, with `slots` of each placed at random.

    The expected maximum of n normal numbers lies about √(2 ln n) − (ln ln n + ln 4π − 2γ) / √(8 ln n) above their mean.
    """
    log = np.log(np.maximum(bins, 2))
    above = np.sqrt(2 * log) - (np.log(log) + np.log(4 * np.pi) - 2 * EULER) / np.sqrt(8 * log)
    return 1 + np.where(bins > 1, above * np.sqrt((1 - 1 / np.maximum(bins, 2)) / np.maximum(slots, 1)), 0.0)


def padded(rows: Number) -> Number:
    """Rows that the GEMM of one expert computes: to the end of its last tile."""
    return rows + TILE / 2
