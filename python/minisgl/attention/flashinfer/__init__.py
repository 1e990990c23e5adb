"""FlashInfer's kernels and our own, as one backend.

    backend.py  the backend: one plan per step for each kind of layer
    step.py     which slices of a step each kernel takes, and on which stream
    decodes.py  attention of a step's decodes: our kernels, or FlashInfer's
    prompts.py  attention of a step's prompts: FlashInfer's wrappers, or ours
    pool.py     the pool and the page table, as FlashInfer's kernels read them
    plans.py    the parts of plans: a shape, and lists of pages
    modules.py  the kernels of prompts: ours, or FlashInfer's, compiled ahead and kept

Knows the kernels, but not how they are captured. Read `backend.py`, then `step.py`.
"""

__all__: list[str] = []
