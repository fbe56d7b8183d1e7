"""A model sharded over ranks: one file a parallelism; `parallelize.py` is the recipe."""
