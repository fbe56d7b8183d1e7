"""Floor 3: the API. Engines in processes of their own, keys and limits before them, OpenAI's routes in front."""
