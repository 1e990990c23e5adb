"""The offline entrance: `LLM`, prompts in, texts out, without server processes."""

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM, GenerationOutput, StreamOutput

__all__ = ["LLM", "GenerationOutput", "SamplingParams", "StreamOutput"]
