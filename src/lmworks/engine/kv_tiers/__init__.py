"""Tiers of the KV cache below the device: host memory, disk, a store that servers share, other servers."""
