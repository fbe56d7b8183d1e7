"""The network against slow oracles: attention on paper, documents alone, cross-entropy whole, experts by loop."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmworks.kernels.rms_norm import reference as rms_reference
from lmworks.kernels.rms_norm import rms_norm
from lmworks.kernels.training import cross_entropy
from lmworks.model import GPT, attention
from lmworks.model.attention import alibi_slopes, dense
from lmworks.model.gpt import LayerNorm, MoE, default_positions
from lmworks.model.rope import frequencies
from lmworks.spec import ModelSpec, SpecError

BATCH, SEQ, VOCAB = 2, 24, 50


def tiny(**changes: Any) -> ModelSpec:
    return ModelSpec.from_dict({"layers": 2, "hidden": 32, "heads": 4, "vocab": VOCAB, "context": 32, **changes})


def lively(spec: ModelSpec, seed: int = 0) -> GPT:
    """A model whose weights are large enough that attention is far from uniform and every bias counts."""
    model = GPT(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm.weight" in name else 0.25 * noise)
    return model


def draw(*shape: int, seed: int = 0, high: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


TOKENS, TARGETS = draw(BATCH, SEQ), draw(BATCH, SEQ, seed=1)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 18, [0] * 24])

SHAPES: dict[str, dict[str, Any]] = {
    "rope": {},
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1, "head_dim": 12},
    "window": {"sliding_window": 5, "kv_heads": 2},
    "layers": {"sliding_window": 5, "layer_types": ("sliding", "full"), "rope_local_theta": 50.0},
    "alibi": {"positions": "alibi", "kv_heads": 2},
    "alibi-window": {"positions": "alibi", "sliding_window": 5},
    "learned": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "tie_embeddings": True},
    "none": {"positions": "none"},
    "qk-norm": {"qk_norm": True, "kv_heads": 2, "tie_embeddings": True},
    "qkv-bias": {"qkv_bias": True},
    "biases": {"bias": True},
    "layer-no-bias": {"norm": "layer"},
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 24},
    "latent": {"kv_lora_rank": 12, "q_lora_rank": 20, "rope_head_dim": 4, "v_head_dim": 6},
    "moe-shared": {"experts": 4, "top_k": 1, "expert_ffn": 24, "shared_experts": 2, "kv_heads": 1},
}


# --- who looks at whom --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("shape", ["rope", "gqa", "mqa", "window", "alibi", "alibi-window", "qk-norm"])
def test_backends_agree(shape: str, documents: torch.Tensor | None) -> None:
    logits = {}
    for backend in ("reference", "sdpa", "flex"):
        with torch.no_grad():
            logits[backend] = lively(tiny(**SHAPES[shape], attention=backend))(TOKENS, documents=documents)
    assert logits["reference"].std() > 0.5
    torch.testing.assert_close(logits["sdpa"], logits["reference"], rtol=0, atol=2e-5)
    torch.testing.assert_close(logits["flex"], logits["reference"], rtol=0, atol=2e-5)


def test_flex_refuses_to_train_on_a_cpu() -> None:
    with pytest.raises(SpecError, match=r"model\.attention = 'flex' cannot train on a CPU.*use 'sdpa'"):
        GPT(tiny(attention="flex"))(TOKENS)


@pytest.mark.parametrize("shape", ["gqa", "window", "alibi", "qk-norm"])
def test_gradients_of_sdpa_equal_those_of_the_reference(shape: str) -> None:
    grads = {}
    for backend in ("reference", "sdpa"):
        model = lively(tiny(**SHAPES[shape], attention=backend))
        model(TOKENS, TARGETS, documents=DOCUMENTS)[1].backward()
        grads[backend] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in grads["reference"].items():
        torch.testing.assert_close(grads["sdpa"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("shape", ["rope", "learned", "alibi", "window", "none"])
def test_packed_documents_equal_each_document_alone(shape: str) -> None:
    model = lively(tiny(**SHAPES[shape]))
    with torch.no_grad():
        packed = model(TOKENS, documents=DOCUMENTS)[0]
        for begin, end in ((0, 5), (5, 6), (6, 24)):
            alone = model(TOKENS[:1, begin:end])[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=0, atol=2e-5)


def test_positions_start_again_at_each_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [7, 7, 7, 7, 3, 3]])
    expected = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]])
    assert torch.equal(default_positions(torch.zeros(2, 6), documents), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_logit_depends_on_a_later_token(shape: str) -> None:
    model = lively(tiny(**SHAPES[shape]))
    changed = TOKENS.clone()
    changed[:, 13] = (changed[:, 13] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    # Not bitwise: a token that goes to another expert changes the shape of its neighbours' products.
    torch.testing.assert_close(before[:, :13], after[:, :13], rtol=0, atol=1e-5)
    assert (before[:, 13] - after[:, 13]).abs().max() > 1e-2


def test_a_window_hides_what_lies_further_back() -> None:
    """Two layers of 5 keys reach 8 positions back and no further."""
    model = lively(tiny(sliding_window=5))
    changed = TOKENS.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    same = (before == after).all(dim=-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 9 + [True] * 12


def test_alibi_slopes_are_the_published_ones() -> None:
    """8 heads: halves from 1/2 to 1/256; 12: those, then every second of the 16 (Press et al., their code)."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8) == pytest.approx(eight)
    assert alibi_slopes(12) == pytest.approx([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_auto_takes_flex_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fastest", lambda *_, **__: "torch")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    windowed = tiny(sliding_window=5)
    assert dense(windowed, cpu).backend == "sdpa"
    assert dense(tiny(), cuda).backend == "sdpa"
    assert dense(windowed, cuda).backend == "flex"
    assert dense(windowed, cuda, offset=3).backend == "sdpa"


def test_auto_takes_flash_attention_where_it_was_measured_to_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, int]]] = []

    def fastest(op: str, _device: torch.device, **shape: int) -> str:
        seen.append((op, shape))
        return "triton" if op == "sparse_attention" else "torch"

    monkeypatch.setattr(attention, "fastest", fastest)
    cuda, shape = torch.device("cuda"), {"seq": tiny().context, "head_dim": tiny().head_dim}
    assert dense(tiny(sliding_window=5), cuda).backend == "flash"
    assert dense(tiny(), cuda).backend == "sdpa"
    assert seen == [("sparse_attention", shape), ("flash_attention", shape)]
    assert dense(tiny(sliding_window=5), cuda, offset=3).backend == "sdpa"
    assert dense(tiny(sliding_window=5, positions="alibi"), cuda).backend == "flex"
    assert len(seen) == 2


def test_flash_attention_says_what_it_cannot_do() -> None:
    with pytest.raises(SpecError, match=r"run on a GPU, and these tensors are on cpu; use model.attention = 'sdpa'"):
        GPT(tiny(attention="flash"))(TOKENS)
    with pytest.raises(SpecError, match=r"cannot do model.positions = 'alibi'"):
        tiny(attention="flash", positions="alibi")
    with pytest.raises(SpecError, match=r"head_dim = 264 needs 'sdpa'"):
        tiny(attention="flash", head_dim=264)


# --- loss ---------------------------------------------------------------------------------------------

SOME_IGNORED = TARGETS.clone()
SOME_IGNORED[0, :7] = SOME_IGNORED[1, ::3] = -100


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("targets", [TARGETS, SOME_IGNORED], ids=["all", "ignored"])
def test_loss_is_cross_entropy_of_the_next_token(targets: torch.Tensor, keep_logits: bool) -> None:
    model = lively(tiny())
    logits, loss = model(TOKENS, targets, keep_logits=keep_logits)
    oracle = F.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, oracle)
    assert (logits is not None) == keep_logits
    total = model(TOKENS, targets, reduction="sum", keep_logits=keep_logits)[1]
    torch.testing.assert_close(total, oracle * (targets != -100).sum())


def gradients(model: GPT, targets: torch.Tensor, keep_logits: bool, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(TOKENS, targets, keep_logits=keep_logits)[1]
    (scale * loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()} | {"loss": loss.detach()}


# 48 tokens in chunks of 7 (the last has 6), of 1, and with chunk 0 wholly ignored.
@pytest.mark.parametrize("rows", [7, 1, 48, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_has_the_same_gradients(rows: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", rows * VOCAB + 3)
    model = lively(tiny(tie_embeddings=tied))
    whole = gradients(model, SOME_IGNORED, keep_logits=True, scale=3.0)
    chunked = gradients(model, SOME_IGNORED, keep_logits=False, scale=3.0)
    for name in whole:
        torch.testing.assert_close(chunked[name], whole[name], rtol=1e-5, atol=1e-6, msg=name)


def test_chunked_loss_in_bf16_is_as_close_to_fp32_as_bf16_allows() -> None:
    """Both ways of computing it, under autocast, against fp32: neither may be further off than rounding explains."""
    model = lively(tiny(layers=1))
    exact = gradients(model, SOME_IGNORED, keep_logits=True)
    error = {}
    for keep_logits in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            rough = gradients(model, SOME_IGNORED, keep_logits=keep_logits)
        assert abs(rough["loss"] - exact["loss"]) < 2**-7 * exact["loss"]
        error[keep_logits] = {n: ((rough[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact}
    for name, relative in error[False].items():
        assert relative < max(0.03, 1.5 * error[True][name]), (name, relative, error[True][name])


def test_chunked_loss_holds_no_logits() -> None:
    model = lively(tiny(vocab=2000))
    held = {keep: saved_bytes(lambda keep=keep: model(TOKENS, TARGETS, keep_logits=keep)) for keep in (True, False)}
    weight_gradient = 2000 * 32 * 4
    assert held[True] - held[False] > TOKENS.numel() * 2000 * 4 - 2 * weight_gradient


def test_logits_of_the_last_position() -> None:
    model = lively(tiny())
    torch.testing.assert_close(model(TOKENS, only_last=True), model(TOKENS)[:, -1:])


# --- norms, mixture of experts ------------------------------------------------------------------------


def test_rms_norm_equals_its_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-6)):
        x = (3 * torch.randn(2, 5, 4, 24, generator=generator)).to(dtype).requires_grad_()
        weight = torch.randn(24, generator=generator, requires_grad=True)
        g = torch.randn(x.shape, generator=generator)
        results = []
        for norm in (rms_norm, rms_reference):
            out = norm(x, weight, 1e-5)
            results.append((out, *torch.autograd.grad(out, (x, weight), g.to(dtype))))
        for ours, expected in zip(*results, strict=True):
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=10 * tolerance)


def test_rms_norm_saves_its_input_and_one_number_a_row() -> None:
    x, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    assert saved_bytes(lambda: rms_norm(x, weight, 1e-5)) == 4 * (x.numel() + 64 + 32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_layer_norm_is_pytorchs_and_as_narrow_as_its_input(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Weights may be wider than what they scale; both ways, and wherever autocast stands."""
    norm, plain = LayerNorm(24, bias=bias), nn.LayerNorm(24, bias=bias)
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)
    plain.load_state_dict(norm.state_dict())
    x = (3 * torch.randn(2, 5, 24, generator=generator)).to(dtype).requires_grad_()
    g = torch.randn(x.shape, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(x)
    assert out.dtype == dtype
    expected = plain(x.float())
    grads = torch.autograd.grad(out, (x, *norm.parameters()), g.to(dtype))
    wanted = torch.autograd.grad(expected, (x, *plain.parameters()), g.to(dtype).float())
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("shared", [0, 2])
def test_moe_equals_a_loop_over_tokens(shared: int) -> None:
    spec = tiny(experts=5, top_k=2, expert_ffn=24, shared_experts=shared)
    moe = lively(spec).blocks["0"].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(x)
    for index in [(b, t) for b in range(2) for t in range(9)]:
        token = x[index]
        probs = torch.softmax(moe.router.weight @ token, dim=0)
        best = sorted(range(5), key=probs.tolist().__getitem__, reverse=True)[:2]
        for e in best:
            h = F.silu(moe.gate[e] @ token) * (moe.up[e] @ token)
            expected[index] += (moe.down[e] @ h) * (probs[e] / probs[best].sum())
        if moe.shared is not None:
            expected[index] += moe.shared(token)
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5)


def test_moe_gradients_reach_router_and_chosen_experts() -> None:
    model = lively(tiny(experts=4, top_k=1, expert_ffn=24))
    model(TOKENS, TARGETS)[1].backward()
    mlp = model.blocks["0"].mlp
    visited = {int(e) for e in range(4) if mlp.gate.grad[e].abs().sum() > 0}
    assert visited and all(parameter.grad is not None for parameter in mlp.parameters())


# --- rotary frequencies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 8.0},
        {"type": "llama3", "factor": 8.0, "original_context": 8192},
        {"type": "llama3", "factor": 32.0, "original_context": 256, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        {"type": "yarn", "factor": 4.0, "original_context": 4096},
        {"type": "yarn", "factor": 16.0, "original_context": 32, "beta_fast": 4.0, "beta_slow": 0.5},
        {"type": "yarn", "factor": 1.0, "original_context": 4096},
    ],
    ids=lambda scaling: f"{scaling['type']}-{scaling['factor']:g}",
)
def test_stretched_frequencies_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from lmworks.spec.hf_config import config_of_spec

    # YaRN in transformers 4 takes the ratio of the contexts for the factor: keep the two equal.
    context = int(scaling["factor"] * scaling.get("original_context", 8192))
    spec = tiny(head_dim=64, context=context, rope_theta=500_000.0, rope_scaling=scaling)
    config = transformers.LlamaConfig(**config_of_spec(spec))
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["type"]](config, torch.device("cpu"))
    freqs, temperature = frequencies(spec, torch.arange(4))
    torch.testing.assert_close(freqs, expected, rtol=2e-6, atol=0)
    assert temperature == pytest.approx(factor)


def test_static_ntk_stretches_the_slowest_pair_by_the_factor_and_the_fastest_not() -> None:
    plain, _ = frequencies(tiny(head_dim=64), torch.arange(4))
    stretched, _ = frequencies(tiny(head_dim=64, rope_scaling={"type": "ntk", "factor": 8.0}), torch.arange(4))
    base = 10_000 * 8 ** (64 / 62)
    torch.testing.assert_close(stretched, torch.tensor([base ** (-2 * i / 64) for i in range(32)]), rtol=1e-5, atol=0)
    assert stretched[0] == plain[0] and float(plain[-1] / stretched[-1]) == pytest.approx(8.0, rel=1e-4)


# --- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_is_the_spec_s(shape: str) -> None:
    spec = tiny(**SHAPES[shape])
    with torch.device("meta"):
        model = GPT(spec)
    assert sum(p.numel() for p in model.parameters()) == spec.params


def test_initial_spread_of_each_kind_of_matrix() -> None:
    spec = tiny(hidden=128, layers=8, experts=4, expert_ffn=64, shared_experts=1, bias=False)
    model = GPT(spec, seed=5)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if "norm" in name:
            assert (values == 1).all()
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down", "mlp.shared.down.weight"))
        expected = 0.02 / math.sqrt(16) if residual else 0.02
        deviations = 5 / math.sqrt(2 * values.numel())  # of the measured spread, five standard errors
        assert values.std().item() == pytest.approx(expected, rel=deviations), name
        assert abs(values.mean().item()) < 5 * expected / math.sqrt(values.numel()), name
    biased = GPT(tiny(bias=True, norm="layer"))
    assert all((p == 0).all() for name, p in biased.named_parameters() if name.endswith("bias"))


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    two, eight = GPT(tiny(layers=2), seed=1), GPT(tiny(layers=8), seed=1)
    other = dict(GPT(tiny(layers=2), seed=2).named_parameters())
    deeper = dict(eight.named_parameters())
    for name, parameter in two.named_parameters():
        residual = name.endswith(("attention.out.weight", "down.weight"))
        # The residual outputs differ by the scale that their depth asks for, and by nothing else.
        torch.testing.assert_close(parameter, deeper[name] * (2.0 if residual else 1.0), rtol=1e-6, atol=0)
        assert residual or torch.equal(parameter, deeper[name])
        assert "norm" in name or not torch.equal(parameter, other[name])
    matrices = [p for p in two.parameters() if p.shape == (32, 32)]
    assert len(matrices) > 4 and not any(torch.equal(matrices[0], p) for p in matrices[1:])


@pytest.mark.parametrize("shape", ["learned", "moe-shared", "qk-norm"])
def test_meta_build_then_init_equals_a_direct_build(shape: str) -> None:
    spec = tiny(**SHAPES[shape])
    with torch.device("meta"):
        model = GPT(spec)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)  # whatever the memory held
    model.init_weights(seed=4)
    direct = GPT(spec, seed=4).state_dict()
    assert all(torch.equal(tensor, direct[name]) for name, tensor in model.state_dict().items())


# --- recompute ----------------------------------------------------------------------------------------


def saved_bytes(run: Any) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, parameters included."""
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # or a freed address would be counted for two
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values())


class Storages(TorchDispatchMode):
    """Remembers every storage that an operation made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.made[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return out


def held_bytes(model: GPT) -> int:
    """Bytes made by a forward pass and alive after it; autograd's hooks do not see what selective recompute keeps."""
    weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
    with Storages() as storages:
        result = model(TOKENS, TARGETS)
    held = sum(n for storage, n in storages.made.items() if not storage.expired() and storage not in weights)
    del result
    return held


@pytest.mark.parametrize("shape", ["gqa", "window", "alibi", "learned", "moe-shared", "qk-norm"])
def test_recompute_changes_no_gradient(shape: str) -> None:
    grads = {}
    for policy in ("none", "selective", "mlp", "full"):
        model = lively(tiny(**SHAPES[shape]))
        model.recompute = policy
        model(TOKENS, TARGETS, documents=DOCUMENTS)[1].backward()
        grads[policy] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in grads["none"].items():
        for policy in ("selective", "mlp", "full"):
            assert torch.equal(grads[policy][name], expected), (policy, name)


def test_recompute_keeps_less() -> None:
    """Bytes that one more block keeps after the forward pass, in units of its input, with an MLP 4 units wide."""
    unit = TOKENS.numel() * 32 * 4
    held = {}
    for policy in ("none", "selective", "mlp", "full"):
        depths = []
        for layers in (1, 2):
            model = lively(tiny(layers=layers, ffn=128))
            model.recompute = policy
            depths.append(held_bytes(model))
        held[policy] = round((depths[1] - depths[0]) / unit, 1)
    # none: inputs and results of two norms, q and k (turned), v, attention; four of the MLP, 4 each; row sums.
    # selective: its input, and the results of q, k, v, attention, out, gate, up and down; mlp: of the first five.
    assert held == {"none": 24.2, "selective": 15.1, "mlp": 6.1, "full": 1.0}


# --- as a program -------------------------------------------------------------------------------------


def test_the_file_runs_as_a_program_without_a_warning() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "lmworks.model.gpt"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0 and result.stderr == ""
    assert "logits (2, 128, 320)" in result.stdout and "loss 5.7" in result.stdout
