"""Mini-SGLang: a compact, high-performance inference engine for large language models.

    minisgl.llm.LLM       offline: prompts in, texts out
    python -m minisgl     online: an OpenAI-compatible server, or a chat in the terminal

The parts, bottom up; each imports only from those of its tier and of the tiers before it:
core, config, sampling_params, schemas, errors, utils, processes, worker_info · checkpoint,
rank_counts, builds, distributed, grammar, message, kernel · layers, attention, kvcache, moe ·
models · engine, scheduler · rank_process, tokenizer, server, llm, benchmark.

    __main__.py         `python -m minisgl`, and the installed command `minisgl`
    core.py             requests, plans and batches; the key of dimension letters
    sampling_params.py  the parameters of a request, and their bounds
    config.py           options of engine and scheduler, and how an option is declared
    errors.py           the error tree
    rank_counts.py      how many ranks can divide a model
    rank_process.py     the process of a rank: compilers run while it imports torch
    worker_info.py      what workers say of themselves when they are ready
    version.py          the version

Every package lists its files in its docstring, as here. `docs/reading-order.md` is the guided tour.
"""

from minisgl.version import __version__

__all__ = ["__version__"]
