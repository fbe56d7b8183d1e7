"""Operators in C++ and CUDA, built on first use through torch.utils.cpp_extension (docs/native-ops.md)."""

from .rms_norm import load, rms_norm

__all__ = ["load", "rms_norm"]
