"""LoRA adapters: read from PEFT folders, applied several at once in one batch."""
