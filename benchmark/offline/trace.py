"""Where the time of decode steps goes: kernels of a profiler's trace, and the gaps between them.

    python benchmark/offline/trace.py --model qwen3-0.6b [--requests 1 256] [--steps 40] \\
        [--out results.jsonl]

Each run decodes requests like those of w1 (prompts of 100 to 1024 ids); every traced step has all
of them. The first and last fifth of a trace are dropped, since the profiler itself works there. The
idle share counts every gap between kernels, whether the host causes it or not.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.llm import LLM, SamplingParams

MODELS = Path(__file__).parent.parent / "models"
PROMPT_STEPS = 256  # at most; the first requests have as many tokens when the last one begins
WARM_STEPS = 20


@dataclass(frozen=True)
class Span:
    """A kernel or a copy on the device, in microseconds."""

    begin: float
    end: float
    name: str


def decode(llm: LLM, num_requests: int, num_steps: int) -> Iterator[None]:
    """Yield after each step of `num_requests`, once all prompts and the warm-up are over."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 9999) for _ in range(source.randint(100, 1024))]
        for _ in range(num_requests)
    ]
    params = SamplingParams(
        temperature=0.6, max_tokens=PROMPT_STEPS + WARM_STEPS + num_steps, ignore_eos=True
    )
    answers = llm.stream(prompts, params)
    not_begun = set(range(num_requests))
    while not_begun:
        not_begun.discard(next(answers).index)
    for seen, _ in enumerate(answers, start=1):
        step, rest = divmod(seen, num_requests)
        if rest == 0 and step >= WARM_STEPS:
            yield
        if step == WARM_STEPS + num_steps:
            break
    answers.close()


def trace(llm: LLM, num_requests: int, num_steps: int) -> tuple[list[Span], float]:
    """Run the steps twice: timed, and then under the profiler.

    Returns:
        the middle of the device's spans, and the seconds of a step without the profiler.
    """
    steps = decode(llm, num_requests, num_steps)
    next(steps)
    began = time.perf_counter()
    num_timed = sum(1 for _ in steps)
    wall = (time.perf_counter() - began) / num_timed

    steps = decode(llm, num_requests, num_steps)
    next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in steps:
            pass
    spans = [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    spans.sort(key=lambda span: span.begin)
    edge = (spans[-1].end - spans[0].begin) / 5
    begin = spans[0].begin + edge
    end = spans[-1].end - edge
    return [span for span in spans if begin <= span.begin <= end], wall


def gaps(spans: list[Span]) -> Iterator[tuple[float, Span, Span]]:
    """Yield each gap in which nothing ran: its length, the span before it and the span after it."""
    last = spans[0]
    for span in spans[1:]:
        if span.begin > last.end:
            yield span.begin - last.end, last, span
        if span.end > last.end:
            last = span


def print_table(title: str, times: dict[str, list[float]], whole: float, num_rows: int) -> None:
    print(f"  {title:72}{'calls':>7}{'µs each':>10}{'of all':>8}")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:num_rows]:
        print(f"  {name[:70]:72}{len(each):7}{sum(each) / len(each):10.2f}{sum(each) / whole:8.1%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen3-0.6b", choices=sorted(path.name for path in MODELS.iterdir())
    )
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=positive, default=40, help="to trace")
    parser.add_argument(
        "--rows", type=positive, default=16, help="of kernels, and half as many of gaps"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help='options of the engine, as {"page_size": 1}'
    )
    parser.add_argument("--out", type=output_file, help="append figures to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.engine.get("tp", 1) > 1:
        raise SystemExit("--engine: only one rank is traced, others run in their own processes")
    figures = []
    options = {"max_seq_len": 4352, "max_prefill_length": 16384, **args.engine}
    with LLM(MODELS / args.model, skip_tokenizer_init=True, dummy_weight=True, **options) as llm:
        for num_requests in args.requests:
            spans, wall = trace(llm, num_requests, args.steps)
            whole = max(span.end for span in spans) - spans[0].begin
            busy = defaultdict(list)
            idle = defaultdict(list)
            for span in spans:
                busy[span.name].append(span.end - span.begin)
            for length, before, after in gaps(spans):
                idle[f"{before.name[:34]} → {after.name[:34]}"].append(length)
            idle_share = sum(map(sum, idle.values())) / whole
            traced = f"of {whole / 1e3:.2f} ms traced {idle_share:.1%} idle"
            print(f"{num_requests} requests: {wall * 1e3:.3f} ms a step; {traced}", flush=True)
            print_table("kernel", busy, whole, args.rows)
            print_table("idle between", idle, whole, args.rows // 2)
            about = {
                "engine": "minisgl",
                "workload": f"decode {num_requests}",
                "model": args.model,
                "device": "cuda",
            }
            figures.append(Figure(metric="idle_share", values=[round(idle_share, 5)], **about))
            figures.append(Figure(metric="ms_per_step", values=[round(wall * 1e3, 4)], **about))
    if args.out:
        append_figures(args.out, figures)


if __name__ == "__main__":
    main()
