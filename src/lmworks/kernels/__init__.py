"""Fused operations, each beside the plain-torch expression that it must equal. Imports only `spec`."""
