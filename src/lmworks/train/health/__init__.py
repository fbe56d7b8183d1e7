"""Health checks of a run: spikes, NaN and Inf, replicas that differ, statistics."""
