"""Scaling laws: fits with intervals, and the run that a budget buys."""
