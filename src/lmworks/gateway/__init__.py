"""The gateway: one address in front of many OpenAI-compatible servers (`lmworks gateway CONFIG.toml`)."""
