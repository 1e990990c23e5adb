"""Measuring: `client` puts load on an OpenAI-compatible server, `perf` writes figures down.

`client` needs `minisgl[bench]`.
"""

__all__: list[str] = []
