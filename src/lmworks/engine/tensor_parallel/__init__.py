"""Tensor-parallel serving: rank 0 drives workers that hold a shard of every layer."""
