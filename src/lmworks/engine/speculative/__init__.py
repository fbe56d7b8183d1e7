"""Speculative decoding: draft tokens from a draft model or n-grams, and their verification."""
