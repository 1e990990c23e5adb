"""Benchmarks: `serve` puts load on an OpenAI-compatible server, `perf` records figures.

    serve.py      the command: load on any OpenAI-compatible server
    flags.py      its flags, and the workloads that they describe
    arguments.py  types of arguments: numbers within bounds, and files to write
    perf.py       results as JSON lines, with machine and versions
    online/       the parts of `serve`
    stress/       attacks and long load on a running server

`serve`, `online` and `stress` need `minisgl[bench]`.
"""

__all__: list[str] = []
