"""Endpoints that are not OpenAI's: /generate, /tokenize, /detokenize."""
