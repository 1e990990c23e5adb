"""Steps captured as graphs: the host makes one call instead of hundreds.

    runner.py   captures steps, and replays them
    key.py      which graph takes a plan
    sizes.py    which sizes are captured
    inputs.py   what a graph reads of a plan, on the host and the device
    capture.py  captures a call as a CUDA graph, or as a `CpuGraph`

Knows nothing of requests beyond the slices of a plan. Read `key.py`, `inputs.py`, then `runner.py`.
"""

__all__: list[str] = []
