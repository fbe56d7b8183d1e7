"""Floor 2: a model laid over ranks. One file a parallelism; `apply.py` is the recipe."""
