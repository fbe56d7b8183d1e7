"""Fleets of servers: planned, simulated against traces, started, described for Kubernetes, and checked."""
