"""Diagnosis of a run from its records: goodput, checkpoint interval, hangs. Imports no torch."""
