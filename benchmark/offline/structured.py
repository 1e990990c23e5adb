"""The cost of a JSON schema on every request: decoded tokens per second with and without, in turns.

    python benchmark/offline/structured.py [--model FOLDER] [--dummy-weight] [--requests 8] \\
        [--out results.jsonl]

The schemas are lists of objects that never end, so that all variants make equally many tokens. One
has the constraints that OpenAI documents for strict schemas. The other adds a `maxLength`, which is
none of those and costs more. The time of one token each, prompt and first mask included, is
subtracted; schemas are compiled before.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.checkpoint import model_name
from minisgl.core import Grammar
from minisgl.llm import LLM, SamplingParams
from minisgl.utils import detect_hardware

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.org$"},
        "born": {"type": "string", "format": "date"},
        "role": {"enum": ["reader", "writer", "owner"]},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "born", "role", "scores"],
    "additionalProperties": False,
}
SHORT = PERSON | {
    "properties": PERSON["properties"] | {"name": {"type": "string", "maxLength": 24}}
}


def endless(item: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "array", "minItems": 100_000, "items": item}))


GRAMMARS = {
    "plain": None,
    "json_schema": endless(PERSON),
    "json_schema with maxLength": endless(SHORT),
}


def speed(llm: LLM, grammar: Grammar | None, args: argparse.Namespace) -> float:
    """Tokens per second after the first token of each request."""
    source = random.Random(0)
    prompts = [
        [source.randint(100, 9999) for _ in range(args.prompt)] for _ in range(args.requests)
    ]

    def seconds(num_tokens: int) -> float:
        each = [
            SamplingParams(
                temperature=0.6, seed=i, max_tokens=num_tokens, ignore_eos=True, grammar=grammar
            )
            for i in range(args.requests)
        ]
        began = time.perf_counter()
        outs = llm.generate(prompts, each, use_tqdm=False)
        assert all(len(out.token_ids) == num_tokens for out in outs)
        return time.perf_counter() - began

    seconds(1)
    first = seconds(1)
    tokens_per_s: float = args.requests * (args.tokens - 1) / (seconds(args.tokens) - first)
    return tokens_per_s


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder with a tokenizer; default: the default model")
    parser.add_argument("--dummy-weight", action="store_true")
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--prompt", type=positive, default=64, help="tokens")
    parser.add_argument("--tokens", type=positive, default=128, help="to make for each request")
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--out", type=output_file, help="append figures to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    speeds: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    with LLM(args.model, dummy_weight=args.dummy_weight, skip_tokenizer_init=True) as llm:
        for i in range(args.repeat + 1):
            for name, grammar in GRAMMARS.items():
                value = speed(llm, grammar, args)
                if i > 0:  # the first time warms up
                    speeds[name].append(value)
    for name, values in speeds.items():
        ratio = median(values) / median(speeds["plain"])
        print(f"{name:36} {median(values):8.0f} tok/s  {ratio:6.1%}")
    if args.out:
        workload = f"{args.requests} requests, {args.tokens} tokens, "
        device = detect_hardware().device
        figures = [
            Figure(
                engine="minisgl",
                workload=workload + name,
                model=model_name(args.model),
                device=device,
                metric="decode_tok_s",
                values=values,
            )
            for name, values in speeds.items()
        ]
        append_figures(args.out, figures)


if __name__ == "__main__":
    main()
