"""Endpoints that are not OpenAI's.

    generate.py  POST /generate
    tokenize.py  POST /tokenize and /detokenize

They are made of the parts of which OpenAI's are. Read `generate.py`.
"""

__all__: list[str] = []
