"""The OpenAI-compatible API: engines in processes of their own, keys and limits before them, routes in front."""
