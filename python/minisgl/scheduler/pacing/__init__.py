"""How much a step computes: as many tokens of prompts as fit a budget in time.

    pacer.py  the budget of each step, equal on all ranks
    costs.py  how long a step takes: a model that is fitted while serving
    watch.py  rank 0's clock: what it measures becomes the costs that all ranks know

Read `pacer.py`, and docs/decisions/0017 for the reasons.
"""

__all__: list[str] = []
