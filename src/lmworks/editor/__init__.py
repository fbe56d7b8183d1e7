"""Code completion in an editor: prompts of files and a cursor, where an answer ends, a language server."""
