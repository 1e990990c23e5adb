"""Endpoints that are not OpenAI's.

    generate.py  POST /generate
    tokenize.py  POST /tokenize and /detokenize

They are built from the same parts as OpenAI's. Read `generate.py`.
"""

__all__: list[str] = []
