"""Runs a batch: weights, KV pool, attention and sampling of one tensor-parallel rank.

    engine.py   `Engine`: makes everything once, then launches plans
    sample.py   logits to tokens
    logits.py   penalties, bias, log probabilities
    prompts.py  log probabilities of a prompt, and its embedding
    output.py   what the host waits for
    memory.py   how many pages fit

Does not know which requests there are; that is the scheduler's. Read `engine.py`.
"""

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine, EngineLimits
from minisgl.engine.output import ForwardOutput
from minisgl.engine.sample import BatchSamplingArgs, sample

__all__ = ["BatchSamplingArgs", "Engine", "EngineConfig", "EngineLimits", "ForwardOutput", "sample"]
