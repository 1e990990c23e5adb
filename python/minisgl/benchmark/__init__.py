"""Measuring: `serve` puts load on an OpenAI-compatible server, `perf` writes figures down.

    serve.py      the command: load on any OpenAI-compatible server
    flags.py      its flags, and the workloads that they describe
    arguments.py  what command lines take: numbers within bounds, and files to write
    perf.py       results as JSON lines, with machine and versions
    online/       what `serve` is made of
    stress/       attacks and long load on a running server

`serve`, `online` and `stress` need `minisgl[bench]`.
"""

__all__: list[str] = []
