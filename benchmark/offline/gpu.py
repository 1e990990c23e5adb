"""Throughput, latency, prefill and shared prefixes on a GPU, with random weights: w1 to w4.

    python benchmark/offline/gpu.py --model qwen3-0.6b --work w1 w2 w3 w4 [--out results.jsonl] \\
        [--engine OPTIONS]

w1  256 prompts of 100..1024 random ids, 100..1024 tokens out each; output tokens per second
w2  one request, 512 ids in, 256 tokens out; time to the first token, in a row and each after 0.2 s
    of rest, and for each token after it. A GPU lowers its clock while it multiplies without a rest
w3  64 prompts of 4096 ids, one token out; input tokens per second
w4  256 requests with a shared prefix of 2048 ids and a suffix of 128 ids, 128 tokens out; first
    with a new prefix, then with new suffixes only

The limit is the speed of a device that only reads each weight and each running request's KV once
per step, and multiplies at its full rate: --bandwidth and --flops, as measured on it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.checkpoint import ModelConfig
from minisgl.config import SchedulerConfig
from minisgl.llm import LLM, SamplingParams

MODELS = Path(__file__).parent.parent / "models"
REST = 0.2  # seconds
Ids = list[int]


@dataclass(frozen=True)
class Limits:
    """Seconds that a perfect engine would take."""

    model: ModelConfig
    bandwidth: float
    flops: float

    @property
    def num_weights(self) -> int:
        """The number of weights that multiply each token; the embedding is only looked up."""
        m = self.model
        attention = m.width * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
        mlp = 3 * m.width * (m.expert_width * m.experts_per_token if m.num_experts else m.mlp_width)
        return m.num_layers * (attention + mlp)

    def prefill(self, length: int, start: int = 0) -> float:
        m = self.model
        pairs = length * start + length * (length + 1) / 2
        attention = 4 * pairs * m.num_heads * m.head_dim * m.num_layers
        return (2 * self.num_weights * length + attention) / self.flops

    def decode_step(self, contexts: list[int]) -> float:
        """Seconds to read weights and KV in bf16; in a mixture, the experts of one token only."""
        m = self.model
        kv = 2 * m.num_layers * m.num_kv_heads * m.head_dim * sum(contexts)
        return 2 * (self.num_weights + m.vocab_size * m.width + kv) / self.bandwidth

    def decode(self, requests: list[tuple[int, int]]) -> float:
        """Seconds of all steps of requests of (prompt, output) lengths that start together."""
        longest = max(out for _, out in requests)
        return sum(
            self.decode_step([n + i for n, out in requests if out > i]) for i in range(1, longest)
        )


def ids(length: int, vocab: int = 10000) -> Ids:
    return [random.randint(0, vocab - 1) for _ in range(length)]


def seconds(llm: LLM, prompts: list[Ids], params: SamplingParams | list[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def exactly(num_tokens: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)


def w1(llm: LLM, limits: Limits, repeat: int) -> list[dict[str, Any]]:
    random.seed(0)
    prompts = [ids(random.randint(100, 1024), vocab=10001) for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    total = sum(lengths)
    seconds(llm, [ids(600) for _ in range(256)], exactly(8, 0.6))
    speeds = []
    for _ in range(repeat):
        speeds.append(total / seconds(llm, prompts, [exactly(n, 0.6) for n in lengths]))
        prompts = [ids(len(prompt)) for prompt in prompts]
    ideal = sum(limits.prefill(len(p)) for p in prompts)
    ideal += limits.decode([(len(p), n) for p, n in zip(prompts, lengths, strict=True)])
    return [{"metric": "out_tok_s", "values": speeds, "limit": total / ideal}]


def w2(llm: LLM, limits: Limits, repeat: int) -> list[dict[str, Any]]:
    def first_token(rest: float) -> float:
        time.sleep(rest)
        return seconds(llm, [ids(512)], exactly(1))

    seconds(llm, [ids(512)], exactly(64))
    first = [first_token(0) for _ in range(4 * repeat)]
    rested = [first_token(REST) for _ in range(4 * repeat)]
    ttft = statistics.median(first)
    each = [(seconds(llm, [ids(512)], exactly(256)) - ttft) / 255 * 1e3 for _ in range(2 * repeat)]
    ideal = limits.decode([(512, 256)]) / 255 * 1e3
    ideal_first = limits.prefill(512) * 1e3
    return [
        {"metric": "ttft_ms", "values": [1e3 * s for s in first], "limit": ideal_first},
        {"metric": "ttft_rested_ms", "values": [1e3 * s for s in rested], "limit": ideal_first},
        {"metric": "ms_per_token", "values": each, "limit": ideal},
    ]


def w3(llm: LLM, limits: Limits, repeat: int) -> list[dict[str, Any]]:
    seconds(llm, [ids(4096) for _ in range(8)], exactly(1))
    speeds = []
    for _ in range(repeat):
        prompts = [ids(4096) for _ in range(64)]
        speeds.append(64 * 4096 / seconds(llm, prompts, exactly(1)))
    return [{"metric": "in_tok_s", "values": speeds, "limit": 4096 / limits.prefill(4096)}]


def w4(llm: LLM, limits: Limits, repeat: int) -> list[dict[str, Any]]:
    total = 256 * 128
    cold: list[float] = []
    warm: list[float] = []
    seconds(llm, [ids(600) for _ in range(256)], exactly(8))
    for _ in range(repeat):
        prefix = ids(2048)
        for speeds in (cold, warm):
            prompts = [prefix + ids(128) for _ in range(256)]
            speeds.append(total / seconds(llm, prompts, exactly(128)))
    warm_s = 256 * limits.prefill(128, 2048) + limits.decode([(2176, 128)] * 256)
    cold_s = warm_s + limits.prefill(2048)
    return [
        {"metric": "cold_out_tok_s", "values": cold, "limit": total / cold_s},
        {"metric": "warm_out_tok_s", "values": warm, "limit": total / warm_s},
    ]


WORK = {"w1": w1, "w2": w2, "w3": w3, "w4": w4}


def comparison(figure: Figure, limit: float) -> str:
    """The figure beside its limit, and how much of the limit it reaches."""
    ratio = figure.value / limit
    is_time = figure.metric.startswith(("ttft", "ms"))
    reached = 1 / ratio if is_time else ratio
    return f"{figure.metric:16}{figure.value:12.2f}  limit {limit:12.2f}  {reached:6.1%}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen3-0.6b", choices=sorted(path.name for path in MODELS.iterdir())
    )
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=list(WORK))
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--out", type=output_file, default=Path("benchmark/results/gpu.jsonl"))
    parser.add_argument(
        "--bandwidth", type=float, default=4.31e12, help="bytes per second that the device copies"
    )
    parser.add_argument(
        "--flops", type=float, default=790e12, help="bf16 operations per second of a matrix product"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help='options of the engine, as {"page_size": 1}'
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    known = {field.name for field in fields(SchedulerConfig)}
    assert args.engine.keys() <= known, args.engine.keys() - known
    options = {
        "max_seq_len": 4352,
        "max_prefill_length": 16384,
        "max_running_requests": 256,
        **args.engine,
    }
    folder = MODELS / args.model
    tp = options.get("tp", 1)
    limits = Limits(ModelConfig.from_folder(folder), tp * args.bandwidth, tp * args.flops)
    began = time.perf_counter()
    with LLM(folder, skip_tokenizer_init=True, dummy_weight=True, **options) as llm:
        print(f"{args.model}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        for name in args.work:
            for row in WORK[name](llm, limits, args.repeat):
                values = [round(value, 3) for value in row["values"]]
                figure = Figure(
                    engine="minisgl",
                    workload=name,
                    model=args.model,
                    device="cuda",
                    tp=tp,
                    metric=row["metric"],
                    values=values,
                )
                print(f"{name} {comparison(figure, row['limit'])}", flush=True)
                append_figures(args.out, [figure])


if __name__ == "__main__":
    main()
