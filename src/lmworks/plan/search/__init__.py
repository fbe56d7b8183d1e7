"""Which layout: every legal one, the best of them, and why not another."""
