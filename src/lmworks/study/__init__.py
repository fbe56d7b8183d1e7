"""Floor 4: comparisons of several runs: layouts with one rank, one simulated rank of many, strategies side by side."""
