"""Runs a batch: weights, KV pool, attention and sampling of one tensor-parallel rank.

    engine.py   `Engine`: makes everything once, then launches plans
    choose.py   logits to tokens in the token pool, whatever is asked of them
    sample.py   logits to tokens by temperature, filters and seed
    logits.py   penalties, bias, log probabilities
    prompts.py  log probabilities of a prompt, and its embedding
    graph.py    steps as CUDA graphs; record.py makes them
    output.py   what the host waits for
    memory.py   how many pages fit

Does not know which requests there are; that is the scheduler's. Read `engine.py`.
"""

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine, EngineLimits
from minisgl.engine.output import ForwardOutput
from minisgl.engine.sample import BatchSamplingArgs, sample

__all__ = ["BatchSamplingArgs", "Engine", "EngineConfig", "EngineLimits", "ForwardOutput", "sample"]
