"""Fault injection into real training jobs, and the comparison with a reference run that had no fault."""
