"""The gain of each idea: the same requests, with one idea switched off at a time.

    python benchmark/offline/ablations.py [--model FOLDER] [--dummy-weight] \\
        [--out results.jsonl] [--plot ablations.svg]

The requests share a prefix, so that the prefix cache has something to do. They are sent twice, and
the second round finds more of them cached. The figure is output tokens per second of both rounds
together.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from minisgl.benchmark.arguments import natural, output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.llm import LLM, SamplingParams
from minisgl.utils import detect_hardware


def variants(device: str) -> dict[str, dict[str, Any]]:
    """Return each variant's name, and the options in which it differs from the first."""
    graphs = {"no CUDA graphs": {"cuda_graph_max_bs": 0}} if device == "cuda" else {}
    return {
        "all": {},
        "no overlap" if device == "cuda" else "overlap": {"overlap": device != "cuda"},
        **graphs,
        "no prefix cache": {"cache": "naive"},
        "chunks of 128": {"max_prefill_length": 128},
        "chunks of 1024": {"max_prefill_length": 1024},
    }


def speed(options: dict[str, Any], args: argparse.Namespace) -> float:
    random.seed(0)
    prefix = [random.randint(100, 9999) for _ in range(args.shared)]
    prompts = [
        prefix + [random.randint(100, 9999) for _ in range(args.suffix)]
        for _ in range(args.requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(
        args.model, skip_tokenizer_init=True, dummy_weight=args.dummy_weight, **options
    ) as llm:
        warm_up = [prompt[::-1] for prompt in prompts[:4]]  # they have other prefixes
        llm.generate(warm_up, params, use_tqdm=False)
        began = time.perf_counter()
        for _ in range(2):
            llm.generate(prompts, params, use_tqdm=False)
        tokens_per_s: float = 2 * args.requests * args.tokens / (time.perf_counter() - began)
        return tokens_per_s


def draw(path: Path, medians: dict[str, float]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 * len(medians) + 1), layout="constrained")
    bars = axes.barh(list(medians), list(medians.values()))
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second")
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a folder, a .gguf file or a hub id; the default model if absent"
    )
    parser.add_argument("--dummy-weight", action="store_true")
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument(
        "--shared", type=natural, default=512, help="ids that all prompts begin with"
    )
    parser.add_argument("--suffix", type=positive, default=64, help="further ids of each prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="of each answer")
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--out", type=output_file)
    parser.add_argument("--plot", type=output_file, help="draw a picture, too; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = detect_hardware().device
    all_variants = variants(device)
    speeds: dict[str, list[float]] = {name: [] for name in all_variants}
    # In turns, so that a slow minute of the machine affects all variants.
    for _ in range(args.repeat):
        for name, options in all_variants.items():
            speeds[name].append(round(speed(options, args), 1))
    figures = [
        Figure(
            engine="minisgl",
            workload=f"ablation: {name}",
            model=args.model or "default",
            device=device,
            metric="out_tok_s",
            values=values,
        )
        for name, values in speeds.items()
    ]
    for name, figure in zip(speeds, figures, strict=True):
        print(f"{name:18}{figure.value:10.1f} tok/s {figure.value / figures[0].value:7.2f} x")
    if args.out:
        append_figures(args.out, figures)
    if args.plot:
        draw(args.plot, {name: figure.value for name, figure in zip(speeds, figures, strict=True)})


if __name__ == "__main__":
    main()
