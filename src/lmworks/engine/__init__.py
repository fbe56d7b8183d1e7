"""The inference engine. Requests, paged KV, scheduler, runner, sampler: one concept a file."""
