"""Measuring: `client` loads an OpenAI-compatible server (it needs `minisgl[bench]`), `perf` writes figures down."""

__all__: list[str] = []
