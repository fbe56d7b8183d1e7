"""Quantized models: calibration, formats, folders, drift."""
