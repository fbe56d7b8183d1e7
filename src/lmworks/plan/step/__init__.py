"""The time of a step: kernels, messages, waits, and what hides behind what."""
