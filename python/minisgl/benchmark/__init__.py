"""Measuring: `serve` puts load on an OpenAI-compatible server, `perf` writes figures down.

`online` is what `serve` is made of; `stress` attacks a running server. All three need
`minisgl[bench]`.
"""

__all__: list[str] = []
