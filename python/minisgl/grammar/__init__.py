"""Grammars: tried in a process that can be killed, then compiled by llguidance.

    compiler.py        `GrammarCompiler`: from a grammar to a matcher
    special_tokens.py  keeps texts of grammars from being special tokens; Lark may name one
    trials.py          `GrammarTrials`: owns the trial process, asks it about one grammar at a time
    turns.py           which grammar is next, so that none starves
    trial_process.py   the trial process: a fork of it compiles each grammar under limits

Knows nothing of requests, and does not import torch. Read `trials.py` first.
"""

from minisgl.grammar.compiler import (
    GrammarCompiler,
    GrammarModel,
    deep_stack_executor,
    refusal,
    refused,
)
from minisgl.grammar.trials import GrammarTrials, Trial, TrialLimits, Verdict

__all__ = [
    "GrammarCompiler",
    "GrammarModel",
    "GrammarTrials",
    "Trial",
    "TrialLimits",
    "Verdict",
    "deep_stack_executor",
    "refusal",
    "refused",
]
