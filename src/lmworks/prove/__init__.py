"""Proofs by comparison: layouts against one rank (parity), injected faults (chaos), a simulated rank of many."""
