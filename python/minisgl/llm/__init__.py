"""Offline use: `LLM` takes prompts and returns texts, without a server.

    llm.py           `LLM`: posts prompts, and steps its ranks until they have finished
    arguments.py     one prompt or several, and their parameters
    portions.py      turns prompts into messages, some at a time
    answers.py       from outputs of steps to texts and answers
    claim.py         lets one thread at a time use an `LLM`
    interrupts.py    lets Ctrl-C or an alarm wait for the end of a step
    local_rank.py    the only rank, in this process: a scheduler and its engine
    local_queues.py  the queues of this scheduler
    rank_group.py    several ranks, in processes of their own

Read `llm.py`.
"""

from minisgl.utils.hardware import short_waits

with short_waits():
    from minisgl.core import SamplingParams
    from minisgl.llm.answers import GenerationOutput, StreamOutput
    from minisgl.llm.llm import LLM

__all__ = ["LLM", "GenerationOutput", "SamplingParams", "StreamOutput"]
