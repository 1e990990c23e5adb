"""Endpoints that are not OpenAI's: /generate, /tokenize, /detokenize."""

__all__: list[str] = []
