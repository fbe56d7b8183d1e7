"""The engine proper: scheduler, KV cache, model runner, sampler, detokenizer."""
