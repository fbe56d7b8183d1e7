"""Benchmarks beside their limits: training, engine, server, kernels, collectives; the probe of a machine."""
