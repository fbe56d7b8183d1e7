"""Small models and a tokenizer on disk for TRL's trainers, and the comparison of a loss and its gradients with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from lmworks.align import logprobs_from_logits

PAD, EOS = 0, 1
# Of any trainer. TRL's own defaults are bf16 and activation checkpointing.
ARGUMENTS: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
TOLERANCE = 1e-5


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", *(f"w{i}" for i in range(125))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=template
    )


def save_model(folder: Path, seed: int, head: type = AutoModelForCausalLM, vocab: int = 128) -> Path:
    """0.8M parameters, with weights large enough for answers of very different probability."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
        num_labels=1,
    )
    head.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, head: type = AutoModelForCausalLM) -> nn.Module:
    return head.from_pretrained(folder)


def load_scorer(folder: Path) -> nn.Module:
    return load(folder, AutoModelForSequenceClassification)


def token_logps(model: nn.Module, ids: Tensor, attention_mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Of tokens 1, 2, … given those before them, (batch, tokens − 1), through plain logits."""
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    return logprobs_from_logits(logits[:, :-1], ids[:, 1:], temperature)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def assert_same(loss: Tensor, model: nn.Module, trl_loss: Tensor, trl_model: nn.Module) -> None:
    """Losses, and gradients of every parameter relative to the largest norm of one."""
    assert abs(loss.item() - trl_loss.item()) <= TOLERANCE * max(1.0, abs(trl_loss.item()))
    assert_same_gradients(gradients(loss, model), gradients(trl_loss, trl_model))


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(grad.norm() for grad in expected.values())
    assert largest > 1e-4, "a gradient that vanishes proves nothing"
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= TOLERANCE * largest, name
