"""What the records of a run say about it: goodput, checkpoint interval, hangs. Imports no torch."""
