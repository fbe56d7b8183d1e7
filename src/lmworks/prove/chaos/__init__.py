"""Faults put into real training jobs at a named place, and the proof that nothing was lost by them."""
