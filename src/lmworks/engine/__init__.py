"""Floor 2: inference. Requests, paged KV, scheduler, runner, sampler: one concept a file."""
