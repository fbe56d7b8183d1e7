"""The published keys of a spec: their defaults, ranges and choices. A run that does not name a key relies on its
default, and a spec that was valid once must stay so.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lmworks.spec import RunSpec, SpecError
from lmworks.spec.hardware import Gpu
from lmworks.spec.serving import EngineSpec

# key, default as JSON, and the range or the choices
KEYS = """\
name                                "run"
seed                                0               [0, 9223372036854775808)
deterministic                       false
model.preset                        ""
model.layers                        4               [1, inf)
model.hidden                        256             [1, inf)
model.heads                         4               [1, inf)
model.kv_heads                      0               [0, inf)
model.head_dim                      0               [0, inf)
model.ffn                           0               [0, inf)
model.vocab                         512             [2, inf)
model.context                       256             [1, inf)
model.norm                          "rms"           rms layer
model.norm_placement                "pre"           pre post both
model.norm_eps                      1e-05           (0, inf)
model.positions                     "rope"          rope learned alibi none
model.rope_theta                    10000.0         (0, inf)
model.rope_fraction                 1.0             (0, 1]
model.rope_scaling.type             "none"          none linear ntk dynamic yarn llama3 longrope
model.rope_scaling.factor           1.0             [1, inf)
model.rope_scaling.original_context 0               [0, inf)
model.rope_scaling.low_freq_factor  1.0             (0, inf)
model.rope_scaling.high_freq_factor 4.0             (0, inf)
model.rope_scaling.beta_fast        32.0            (0, inf)
model.rope_scaling.beta_slow        1.0             (0, inf)
model.rope_scaling.truncate         true
model.rope_scaling.attention_factor 0.0             [0, inf)
model.mlp                           "swiglu"        swiglu geglu gelu gelu_erf
model.bias                          false
model.qkv_bias                      false
model.out_bias                      false
model.mlp_bias                      false
model.norm_bias                     false
model.qk_norm                       false
model.qk_norm_whole                 false
model.sliding_window                0               [0, inf)
model.rope_local_theta              0.0             [0, inf)
model.kv_lora_rank                  0               [0, inf)
model.q_lora_rank                   0               [0, inf)
model.rope_head_dim                 0               [0, inf)
model.v_head_dim                    0               [0, inf)
model.rope_interleaved              false
model.attention_scale               0.0             [0, inf)
model.embed_scale                   1.0             (0, inf)
model.residual_scale                1.0             (0, inf)
model.logit_scale                   1.0             (0, inf)
model.attention_softcap             0.0             [0, inf)
model.final_softcap                 0.0             [0, inf)
model.attention_sinks               false
model.tie_embeddings                false
model.scalar_head                   false
model.experts                       0               [0, inf)
model.top_k                         2               [1, inf)
model.shared_experts                0               [0, inf)
model.expert_ffn                    0               [0, inf)
model.router                        "softmax"       softmax sigmoid
model.norm_topk                     true
model.routed_scale                  1.0             (0, inf)
model.expert_groups                 1               [1, inf)
model.top_groups                    1               [1, inf)
model.shared_gate                   false
model.capacity                      0.0             [0, inf)
model.balance_loss                  0.0             [0, inf)
model.choice_bias                   false
model.balance_bias                  0.0             [0, inf)
model.attention                     "auto"          auto reference sdpa flex flash
model.init_std                      0.02            (0, inf)
data.path                           "stdlib:bytes"
data.mix                            {}
data.seq                            128             [1, inf)
data.micro_batch                    8               [1, inf)
data.global_batch                   0               [0, inf)
data.shuffle                        true
data.document_mask                  false
data.fim.rate                       0.0             [0, 1]
data.fim.spm_rate                   0.5             [0, 1]
data.fim.split                      "character"     character token line syntax
data.fim.language                   "python"
data.fim.max_middle                 0               [0, inf)
data.fim.sentinels                  "starcoder"     starcoder codellama qwen mellum own
data.fim.prefix                     ""
data.fim.suffix                     ""
data.fim.middle                     ""
data.workers                        0               [0, inf)
data.verify                         true
data.kind                           "auto"          auto tokens conversations preferences unpaired prompts
data.tokenizer                      ""
data.chat_template                  ""
data.val_path                       ""
data.val_fraction                   0.05            [0, 1)
data.packing                        true
data.bad_examples                   "refuse"        refuse skip
data.overlong                       "refuse"        refuse skip truncate
optim.optimizer                     "adamw"         adamw sgd
optim.steps                         1000            [1, inf)
optim.lr                            0.0003          (0, 10]
optim.schedule                      "cosine"        cosine linear wsd constant
optim.warmup                        -1              [-1, inf)
optim.min_lr_ratio                  0.1             [0, 1]
optim.decay_ratio                   0.2             (0, 1]
optim.beta1                         0.9             [0, 1)
optim.beta2                         0.95            [0, 1)
optim.eps                           1e-08           (0, inf)
optim.weight_decay                  0.1             [0, inf)
optim.clip                          1.0             [0, inf)
parallel.dp                         0               [0, inf)
parallel.dp_replicate               1               [1, inf)
parallel.dp_shard                   1               [1, inf)
parallel.tp                         1               [1, inf)
parallel.sp                         false
parallel.pp                         1               [1, inf)
parallel.cp                         1               [1, inf)
parallel.ep                         1               [1, inf)
parallel.strategy                   "ddp"           ddp fsdp1 fsdp2 zero
parallel.zero                       0               [0, 3]
parallel.engine                     "native"        native deepspeed
parallel.offload                    "none"          none optimizer full
parallel.cp_method                  "ring"          ring ulysses
parallel.schedule                   "1f1b"   gpipe 1f1b interleaved looped-bfs interleaved-zero-bubble zbv dualpipev
parallel.virtual_stages             0               [0, inf)
parallel.reshard                    true
parallel.prefetch                   1               [1, inf)
parallel.bucket_mb                  25.0            (0, inf)
parallel.sync_each_pass             false
parallel.comm_priority              "normal"        normal high
parallel.static_graph               false
parallel.recompute                  "none"          none selective mlp full budget
parallel.recompute_every            1               [1, inf)
parallel.recompute_budget           0.0             [0, inf)
parallel.offload_activations        0.0             [0, inf)
parallel.compile                    false
parallel.async_tp                   false
precision.dtype                     "fp32"          fp32 bf16 fp16 fp8
precision.weights                   "fp32"          fp32 bf16
precision.master                    true
precision.rounding                  "nearest"       nearest stochastic
precision.states                    "fp32"          fp32 bf16
precision.reduce                    "fp32"          fp32 bf16
precision.loss_scale                65536.0         [1, 1099511627776]
precision.loss_scale_window         2000            [1, inf)
precision.fp8_scaling               "tensorwise"    tensorwise rowwise
precision.fp8_head                  false
checkpoint.every                    100             [0, inf)
checkpoint.keep                     3               [0, inf)
checkpoint.keep_every               0               [0, inf)
checkpoint.asynchronous             false
checkpoint.hash                     "sha256"        sha256 xxh3
checkpoint.remote                   ""
checkpoint.init                     ""
fault.max_restarts                  0               [0, inf)
fault.elastic                       false
fault.deadline_s                    120.0           (0, inf)
fault.crash_loop                    "stop"          stop skip
health.spike_loss                   "log"           log lower_lr skip rewind stop
health.spike_grad                   "log"           log lower_lr skip rewind stop
health.nonfinite                    "stop"          lower_lr skip rewind stop
health.corruption                   "stop"          log rewind stop
health.window                       128             [8, inf)
health.warmup                       -1              [-1, inf)
health.z                            8.0             (0, inf)
health.max_actions                  3               [1, inf)
health.rewind_steps                 10              [1, inf)
health.lr_factor                    0.5             (0, 1)
health.lr_steps                     0               [0, inf)
health.rerun                        false
health.hash_every                   0               [0, inf)
health.stats_every                  0               [0, inf)
watch.timeout_s                     1800.0          (0, inf)
watch.straggler                     1.5             (1, inf)
watch.straggler_steps               20              [1, inf)
align.method                        "" sft reward dpo ipo kto orpo simpo grpo dr_grpo dapo gspo rloo best_of_n ppo
align.reference                     ""
align.beta                          -1.0            [-1, inf)
align.label_smoothing               0.0             [0, 0.5)
align.simpo_margin                  1.0             [0, inf)
align.desirable_weight              1.0             [0, inf)
align.undesirable_weight            1.0             [0, inf)
align.sft_weight                    0.0             [0, inf)
align.reward_center                 0.0             [0, inf)
align.rewards                       []
align.reward_weights                []
align.prompts                       32              [1, inf)
align.samples                       8               [1, inf)
align.epochs                        1               [1, inf)
align.max_tokens                    256             [1, inf)
align.temperature                   1.0             (0, inf)
align.top_p                         1.0             (0, 1]
align.top_k                         0               [0, inf)
align.clip                          0.2             (0, 1)
align.clip_high                     -1.0            [-1, inf)
align.kl                            "k3"            k1 k2 k3
align.importance_cap                2.0             [0, inf)
align.overlong_buffer               -1              [-1, inf)
align.dynamic_sampling              -1              [-1, inf)
align.kl_stop                       0.0             [0, inf)
align.held_out_stop                 0               [0, inf)
align.reward_model                  ""
align.critic                        ""
align.critic_head                   "zeros"         zeros normal
align.critic_lr                     0.0             [0, inf)
align.gamma                         1.0             [0, 1]
align.lam                           0.95            [0, 1]
align.value_clip                    0.2             [0, inf)
align.whiten_rewards                false
align.whiten_advantages             true
align.missing_eos_penalty           1.0             [0, inf)
align.kl_target                     6.0             [0, inf)
align.kl_horizon                    10000           [1, inf)
align.environment                   ""
align.max_turns                     8               [1, inf)
align.partial_rollouts              0.0             [0, inf)
align.engine_tp                     1               [1, inf)
align.engine_memory                 0.4             (0, 1)
lora.rank                           0               [0, inf)
lora.alpha                          0.0             [0, inf)
lora.targets                        []
lora.rslora                         false
lora.dora                           false
lora.base                           ""              int8 nf4
lora.init                           ""
log.every                           10              [1, inf)
log.eval_every                      100             [0, inf)
log.eval_batches                    16              [0, inf)
log.tensorboard                     false
log.wandb                           "off"           off offline online
log.project                         "lmworks"
log.profile                         []
log.profile_ranks                   [0]
cluster.gpu                         "auto"
cluster.nodes                       1               [1, inf)
cluster.gpus_per_node               1               [1, inf)
cluster.device                      "auto"          auto cpu cuda
cluster.fabric                      "auto"          auto nvswitch mesh bridge pcie torus
cluster.domain                      0               [0, inf)
cluster.network                     "infiniband"    infiniband roce efa ethernet
cluster.nic_gbs                     0.0             [0, inf)
cluster.price_hour                  0.0             [0, inf)
cluster.catalogue                   ""
cluster.profile                     ""
engine.device                       "auto"
engine.dtype                        "auto"          auto fp32 bf16 fp16
engine.kv_dtype                     "auto"          auto fp8 int8
engine.block                        16              [1, inf)
engine.blocks                       0               [0, inf)
engine.memory                       0.9             (0, 1]
engine.context                      0               [0, inf)
engine.max_seqs                     256             [1, 16384]
engine.max_batch_tokens             0               [0, inf)
engine.prefix_cache                 true
engine.kv_host_gib                  0.0             [0, inf)
engine.kv_disk                      ""
engine.kv_disk_gib                  0.0             [0, inf)
engine.kv_shared                    ""
engine.kv_shared_gib                0.0             [0, inf)
engine.kv_listen                    ""
engine.kv_peers                     []
engine.adapter_store                ""
engine.warm_adapters                50              [1, inf)
engine.graphs                       true
engine.graph_prompts                true
engine.batch_invariant              false
engine.tp                           1               [1, inf)
engine.speculate                    "none"          none ngram draft
engine.draft                        ""
engine.guesses                      4               [1, 64]
gpu.name                            ""
gpu.alias                           ""
gpu.match                           ""
gpu.fp32_tflops                     0.0             [0, inf)
gpu.bf16_tflops                     0.0             [0, inf)
gpu.fp16_tflops                     0.0             [0, inf)
gpu.fp8_tflops                      0.0             [0, inf)
gpu.fp4_tflops                      0.0             [0, inf)
gpu.memory_gb                       0.0             [0, inf)
gpu.bandwidth_gbs                   0.0             [0, inf)
gpu.link_gbs                        0.0             [0, inf)
gpu.fabric                          "pcie"          nvswitch mesh bridge pcie torus
gpu.per_node                        8               [1, inf)
gpu.domain                          0               [0, inf)
gpu.nic_gbs                         0.0             [0, inf)
gpu.host_gbs                        0.0             [0, inf)
gpu.tdp_w                           0.0             [0, inf)
gpu.price_hour                      0.0             [0, inf)
gpu.notes                           ""
gpu.source                          ""
"""
TABLE = [line.split(maxsplit=2) for line in KEYS.splitlines()]
RANGES = [(key, json.loads(default), rest[0]) for key, default, *rest in TABLE if rest and rest[0][0] in "[("]
CHOICES = [(key, rest[0].split()) for key, _, *rest in TABLE if rest and rest[0][0] not in "[("]


def build(key: str, value: Any) -> Any:
    """The spec with this key alone."""
    *sections, name = key.split(".")
    if sections in (["engine"], ["gpu"]):
        return (EngineSpec if sections == ["engine"] else Gpu).from_dict({name: value})
    table = {name: value}
    for section in reversed(sections):
        table = {section: table}
    return RunSpec.from_dict(table)


def errors(key: str, value: Any) -> str:
    try:
        build(key, value)
    except SpecError as error:  # another key may not suit the value: that is not the range
        return str(error)
    return ""


def test_defaults() -> None:
    fields = RunSpec.dotted_keys() | EngineSpec.dotted_keys() | Gpu.dotted_keys()
    for key, default, *_ in TABLE:
        field = fields[key]
        made = field.default_factory() if callable(field.default_factory) else field.default
        assert (key, made) == (key, json.loads(default))


@pytest.mark.parametrize(("key", "default", "limits"), RANGES, ids=[key for key, *_ in RANGES])
def test_the_range_ends_where_it_says(key: str, default: float, limits: str) -> None:
    """The last value inside is accepted, the next one is refused."""
    low, high = (text.strip() for text in limits[1:-1].split(","))
    for text, closed, outwards in ((low, limits[0] == "[", -1), (high, limits[-1] == "]", 1)):
        if text == "inf":
            continue
        bound = int(text) if isinstance(default, int) else float(text)
        inwards = bound - outwards if isinstance(bound, int) else math.nextafter(bound, -outwards * math.inf)
        beyond = bound + outwards if isinstance(bound, int) else math.nextafter(bound, outwards * math.inf)
        inside, outside = (bound, beyond) if closed else (inwards, bound)
        assert "out of range" not in errors(key, inside)
        assert errors(key, outside).startswith(f"{key}") and "out of range" in errors(key, outside)


@pytest.mark.parametrize(("key", "choices"), CHOICES, ids=[key for key, _ in CHOICES])
def test_choices(key: str, choices: list[str]) -> None:
    for choice in choices:
        assert "is not one of" not in errors(key, choice)
    _, refused, listed = errors(key, "other").partition(f"{key} = 'other' is not one of: ")
    assert refused and set(choices) <= set(listed.split(", "))
