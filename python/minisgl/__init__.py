"""Mini-SGLang: a compact, high-performance inference engine for large language models.

    minisgl.llm.LLM       offline: prompts in, texts out
    python -m minisgl     online: an OpenAI-compatible server, or a chat in the terminal

The parts, bottom up; each imports only from those before it:
core, config, errors, utils · checkpoint, builds, distributed, message, kernel · layers, attention,
kvcache, moe · models · engine, scheduler · tokenizer, server, llm, benchmark.
`docs/reading-order.md` is the guided tour.
"""

from minisgl.version import __version__

__all__ = ["__version__"]
