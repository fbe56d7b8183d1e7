"""Many runs of one spec: a space of changes, a folder of trials, workers that run them."""
