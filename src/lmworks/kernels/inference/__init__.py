"""Kernels of the inference engine, each with its plain-torch reference."""
