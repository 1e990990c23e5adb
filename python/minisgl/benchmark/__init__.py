"""Measuring: `client` puts load on an OpenAI-compatible server, `perf` writes figures down.

`stress` attacks a running server. `client` and `stress` need `minisgl[bench]`.
"""

__all__: list[str] = []
