"""Tuning: which trials to start (samplers), which to go on with (stoppers), and what a study of them has found."""
