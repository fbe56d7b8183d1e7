"""Kernels of the training step, each with its plain-torch reference."""
