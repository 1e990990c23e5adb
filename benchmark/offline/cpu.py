"""The default model on a CPU: this engine, transformers and llama.cpp, in turns in one run.

    python benchmark/offline/cpu.py [--repeat 5] [--gguf FILE] [--out benchmark/results/cpu.jsonl]

llama.cpp takes part where `--gguf` names the model's file for it; it needs llama-cpp-python.

prefill: 512 random ids, one token out; the figure is prompt tokens per second.
batch n: n requests of 32 random ids; the figure is tokens per second, over the time of
    NUM_DECODED + 1 greedy tokens each less the time of one token each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.checkpoint import fetch_model
from minisgl.checkpoint.default_model import DEFAULT_MODEL
from minisgl.llm import LLM, SamplingParams
from minisgl.models import open_checkpoint

Generate = Callable[[list[list[int]], int], None]
Measure = Callable[[Generate, np.random.Generator], float]
NUM_DECODED = 32
PROMPT = 32
TIED = "lm_head.weight"  # the embedding's numbers


def transformers_generate(dtype: torch.dtype) -> Generate:
    """The `generate` of transformers over the same weights."""
    folder = fetch_model(None)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to(dtype).eval()
    source = open_checkpoint(folder, dtype, torch.device("cpu"))
    state = {
        name: source.read(name, tuple(t.shape))
        for name, t in model.state_dict().items()
        if name != TIED
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == [TIED]
    assert not unexpected
    model.tie_weights()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )

    return generate


def engine_generate(dtype: str) -> Generate:
    llm = LLM(dtype=dtype, cache="naive")

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return generate


def llama_cpp_generate(gguf: Path) -> Generate:
    """The sequences of a call as one batch per step, by llama.cpp's loop: decode, then sample."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(gguf).encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = 32 * 1024
    options.n_seq_max = 32
    options.n_batch = 2048
    options.n_threads = torch.get_num_threads()
    options.n_threads_batch = torch.get_num_threads()
    context = llama_cpp.llama_init_from_model(model, options)
    greedy = llama_cpp.llama_sampler_init_greedy()
    batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)

    def add(sequence: int, position: int, token: int, wants_logits: bool) -> None:
        index = batch.n_tokens
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wants_logits
        batch.n_tokens += 1

    def step() -> None:
        failed = llama_cpp.llama_decode(context, batch)
        assert not failed
        batch.n_tokens = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        length = len(prompts[0])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                add(sequence, position, token, position == length - 1)
        rows = list(range(length - 1, len(prompts) * length, length))
        step()
        for position in range(length, length + num_tokens - 1):
            sampled = [llama_cpp.llama_sampler_sample(greedy, context, row) for row in rows]
            for sequence, token in enumerate(sampled):
                add(sequence, position, token, True)
            rows = list(range(len(prompts)))
            step()
        for row in rows:
            llama_cpp.llama_sampler_sample(greedy, context, row)

    return generate


def seconds(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    began = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - began


def prefill_speed(generate: Generate, ids: np.random.Generator) -> float:
    return 512 / seconds(generate, random_prompts(ids, 1, 512), 1)


def decode_speed(generate: Generate, ids: np.random.Generator, batch_size: int) -> float:
    prompts = random_prompts(ids, batch_size, PROMPT)
    prefill_s = seconds(generate, prompts, 1)
    return batch_size * NUM_DECODED / (seconds(generate, prompts, NUM_DECODED + 1) - prefill_s)


def random_prompts(ids: np.random.Generator, num: int, length: int) -> list[list[int]]:
    prompts: list[list[int]] = ids.integers(100, 40000, (num, length)).tolist()
    return prompts


def speeds_of(
    engines: dict[str, Generate], measure: Measure, repeat: int
) -> dict[str, list[float]]:
    """Measure the engines in turns, after a turn that warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeat + 1):
        for name, generate in engines.items():
            speed = measure(generate, np.random.default_rng(turn))
            if turn > 0:
                speeds[name].append(speed)
    return speeds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gguf", type=Path, help="the default model for llama.cpp, in f16")
    parser.add_argument("--out", type=output_file, default=Path("benchmark/results/cpu.jsonl"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    engines = {
        "minisgl": engine_generate(args.dtype),
        "transformers": transformers_generate(getattr(torch, args.dtype)),
    }
    if args.gguf is not None:
        engines["llama.cpp"] = llama_cpp_generate(args.gguf)
    workloads: dict[str, Measure] = {"prefill 512": prefill_speed}
    for batch_size in (1, 8, 32):
        workloads[f"batch {batch_size}"] = partial(decode_speed, batch_size=batch_size)

    figures = []
    for workload, measure in workloads.items():
        speeds = speeds_of(engines, measure, args.repeat)
        metric = "in_tok_s" if workload.startswith("prefill") else "out_tok_s"
        for name, values in speeds.items():
            figures.append(
                Figure(
                    engine=name,
                    workload=workload,
                    model=DEFAULT_MODEL,
                    device=f"cpu {args.dtype}",
                    metric=metric,
                    values=[round(value, 1) for value in values],
                )
            )
        medians = [f"{name} {median(values):8.1f}" for name, values in speeds.items()]
        print(f"{workload:12} {'  '.join(medians)}", flush=True)
    append_figures(args.out, figures)


if __name__ == "__main__":
    main()
