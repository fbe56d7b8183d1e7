"""OpenAI's Responses API: `POST /v1/responses`, and what was stored of it."""
