"""Structured output: grammars compiled to token masks."""
