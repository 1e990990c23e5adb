"""Steps captured as graphs: the host launches one call in the place of hundreds.

    runner.py   captures steps, and replays them
    key.py      which graph takes a plan
    sizes.py    which sizes are captured
    inputs.py   what a graph reads of a plan, on the host and the device
    capture.py  a call as a CUDA graph, or as a graph of a CPU

Which requests a step has is not known here. Read `key.py`, `inputs.py`, then `runner.py`.
"""

__all__: list[str] = []
