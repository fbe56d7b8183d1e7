"""Serving: what fits, how fast, how many replicas, what a token costs."""
