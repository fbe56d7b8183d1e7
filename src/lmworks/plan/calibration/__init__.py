"""Calibration of the planner by measured runs: which constants they tell, how well, and a profile that has them."""
