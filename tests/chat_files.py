"""Tokenizers, templates in the style of well-known models, and conversations for the tests of post-training data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lmworks.data.chat_template import Message
from lmworks.data.tokenizer import train_bpe

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
)
TEXT = "the answer is a number and this text says Hello Paris what weather think one two three naïve 数 🙂 "


def write_tokenizer(folder: Path, template: str | None = None, bos: str = "<s>", eos: str = "<|im_end|>") -> Path:
    """Byte-level BPE with the special tokens of many models, as a Hugging Face folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = Tokenizer.from_str(train_bpe([TEXT * 3], 400))
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_sentencepiece(folder: Path, metaspace: bool) -> Path:
    """As Llama 2's and Gemma's are converted: a space is part of the word after it, and one is put before a text."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *pieces, *SPECIAL], show_progress=False)
    inner.train_from_iterator([TEXT * 3], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    return folder


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def talk(*texts: str, system: str = "") -> list[Message]:
    """User and assistant in turns."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]
