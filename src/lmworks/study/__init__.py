"""Floor 4: experiments that compare ways to train: every layout with one rank (`parity`)."""
