"""Pipelines: how a network is cut, in which order a rank works, how long it waits."""
