"""What a run watches in its own numbers: spikes, numbers that are not finite, copies that differ, and statistics."""
