"""Exercise checks: the learner's code runs in a process of its own, and a verdict says what is wrong and why."""
