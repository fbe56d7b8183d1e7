"""Floor 3: looking at runs: reports, lists, comparisons."""
