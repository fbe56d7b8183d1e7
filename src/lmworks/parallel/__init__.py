"""Floor 2: a model laid over ranks. One file a parallelism; `parallelize.py` is the recipe."""
