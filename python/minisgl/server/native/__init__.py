"""Endpoints that are no other API's: /generate, /tokenize, /detokenize.

generate.py  /generate: a text to a text
tokenize.py  /tokenize and /detokenize
"""

__all__: list[str] = []
