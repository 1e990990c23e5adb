"""Compiles every kernel for a Hopper GPU, on any machine; test_gpu.py runs it as a process.

A driver without a device stands in for the GPU's. Triton's kernels are compiled as for a launch,
but not launched. Those in CUDA are compiled where there is nvcc.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from tvm_ffi import libinfo

from minisgl.builds import kernels
from minisgl.kernel import gpu
from minisgl.kernel.gpu import launch
from minisgl.kernel.linear_tiles import linear_tile, tiled_sizes
from minisgl.moe import rule_table
from minisgl.utils.cuda_toolkit import find_cuda_toolkit

_END_OF_FLATTENED = "} {tt.flatten"
# Outputs, of each half where there are two, inputs, halves, and whether a norm adds up parts: of
# Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Llama-3.1-8B and Qwen3-14B, of which some ranks have parts.
TILED_WEIGHTS = [
    *((4096, 1024, 1, False), (1024, 2048, 1, True), (1024, 3072, 1, True), (3072, 1024, 2, False)),
    *((4096, 2048, 1, False), (2048, 2048, 1, True), (2048, 6144, 1, True), (6144, 2048, 2, False)),
    *((6144, 2560, 1, False), (2560, 4096, 1, True), (2560, 9728, 1, True), (9728, 2560, 2, False)),
    *((6144, 4096, 1, False), (4096, 4096, 1, True), (4096, 14336, 1, True)),
    *((14336, 4096, 2, False), (7168, 5120, 1, False), (5120, 5120, 1, True)),
    *((5120, 17408, 1, True), (3584, 5120, 1, False), (5120, 2560, 1, False)),
    *((5120, 8704, 1, False), (8704, 5120, 2, False), (2560, 5120, 1, False)),
    *((4096, 2048, 1, False), (2048, 2048, 2, False), (6400, 5120, 2, False)),
]
HOPPER = {"num_processors": 132, "shared_bytes": 232_448}  # as an H200 says


class NoDevice:
    """The methods of a driver that Triton calls in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    compiled = run(self, *args, grid=grid, warmup=True, **options)
    ttir = compiled.asm["ttir"]
    assert ("flatten=" in self.src) == (_END_OF_FLATTENED in ttir)
    late = read_too_late(ttir)
    assert not late, f"{self.__name__} reads {late} in or after an inner loop: see read_too_late"
    cubin = compiled.asm["cubin"]
    waits = "griddepcontrol.wait" in compiled.asm["ptx"]
    dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    facts = [
        f"{len(cubin)} bytes",
        f"{compiled.metadata.shared} of shared memory",
        f"{stack_bytes(cubin)} spilled of {dtype}",
        "waits" if waits else "does not wait",
    ]
    if "STAGES" in self.arg_names:
        loads = "cp.async" in compiled.asm["ptx"] and "ld.global.v" not in compiled.asm["ptx"]
        facts.insert(-1, "loads in the background" if loads else "loads through registers")
    print(f"{self.__name__}: {', '.join(facts)}")


def read_too_late(ttir: str) -> list[str]:
    """Operations in the inner loop of a flattened one, or after it, that read what is carried.

    Triton 3.6 and 3.9 fuse the two loops into one. There, such an operation may get the value of
    the outer loop's next iteration instead of its own. The inner loop may read what is made of it
    before; what follows may not.
    """
    lines = ttir.splitlines()
    late: list[str] = []
    for end, line in enumerate(lines):
        if _END_OF_FLATTENED not in line:
            continue
        begin = _begin_of_block(lines, end)
        inner_end = max(i for i in range(begin, end) if lines[i].strip().startswith("}"))
        inner_begin = _begin_of_block(lines, inner_end)
        carried = set(re.findall(r"(%\w+) = ", lines[begin].partition("iter_args")[2]))
        inner = (line.partition(" loc(")[0].strip() for line in lines[inner_begin:inner_end])
        late += [operation for operation in inner if carried & set(re.findall(r"%\w+", operation))]
        for number in (*range(begin + 1, inner_begin), *range(inner_end + 1, end)):
            operation, _, _ = lines[number].strip().partition(" loc(")
            result = re.match(r"(%\w+)(:\d+)? = ", operation)
            read = set(re.findall(r"%\w+", operation[result.end() if result else 0 :]))
            if operation.startswith("scf.yield") or not carried & read:
                continue
            if result:
                carried.add(result[1])
            if number > inner_end:
                late.append(operation)
    return late


def _begin_of_block(lines: list[str], end: int) -> int:
    """The line that opens the block that a line closes: the last one that is as far to the left."""
    depth = _indentation(lines[end])
    return max(i for i in range(end) if _indentation(lines[i]) == depth)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def stack_bytes(cubin: bytes) -> int:
    """The bytes that a thread keeps in memory for want of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", usage)))


def main() -> None:
    bf16 = torch.bfloat16
    x = torch.empty(4, 1024, dtype=bf16)
    ints = torch.zeros(64, dtype=torch.int32)
    longs = torch.zeros(64, dtype=torch.int64)
    table = torch.zeros(8, 64, dtype=torch.int32)
    for rows in (1, 4):
        gpu.rms_norm(x[:rows], x[0], 1e-6, x[:rows])
        gpu.add_rms_norm(x[:rows], x[:rows], x[0], 1e-6, x[:rows])
        parts = torch.empty(4, rows, 1024)
        gpu.add_parts_rms_norm(parts, x[:rows], x[0], 1e-6, x[:rows])
    gpu.silu_and_mul(x[:, :512], x[:, 512:], x[:, :512].contiguous())
    pool = torch.empty(2, 16, 16, 8, 128, dtype=bf16)
    qkv = torch.empty(4, 32, 128, dtype=bf16)
    q = torch.empty(4, 16, 128, dtype=bf16)
    angles = torch.empty(2, 64, 128, dtype=bf16)
    for weight in (q[0, 0], q[0, 0, :0]):
        gpu.rotate_and_store(qkv, weight, weight, 1e-6, *angles, ints[:4], longs[:4], *pool)
    gpu.scatter(table, ints, ints)
    gpu.look_up(ints, ints, table, table, 16, longs, longs)
    gpu.list_pages(ints[:4], ints[:5], table, ints)
    logits = torch.empty(4, 1000, dtype=bf16)
    for lowest in (None, torch.empty(4)):
        sampling = (lowest, torch.empty(4), ints[:8].view(4, 2), ints[:4])
        gpu.choose_tokens(logits, *sampling)
        gpu.choose_scored_tokens(logits, *sampling, 1024)
    gpu.mask_logits(logits, ints[:4], ints.view(2, 32))
    gpu.one_token_linear(x[:1], x, None)
    gpu.one_token_linear(x[:1], x, x[0])
    gpu.one_token_silu(x[:1], x)
    tiled_products()
    rows = (ints[:4], ints[:4], ints[:4])
    gpu.attend_decode(q, *pool, table, *rows, q, scale=0.1)
    for width in (80, 128, 256):
        heads = torch.empty(4, 16, width, dtype=bf16)
        pages = torch.empty(2, 16, 64, 8, width, dtype=bf16)
        gpu.attend_prompts_on_device(
            heads, *pages, table, ints, ints, ints[:2], heads, num_tokens=4, scale=0.1
        )
    program_ZX, _ = gpu.plan_shared_prefixes(*rows, ints[:3], 16, 8)
    gpu.attend_shared_prefixes(q, *pool, table, ints[:4], program_ZX, scale=0.1)
    experts()


def tiled_products() -> None:
    """Each variant that the weights of some models take on H200s."""
    tiles = {
        (linear_tile(size, outputs, inputs, halves=halves, may_divide=may_divide, **HOPPER), halves)
        for size in tiled_sizes()
        for outputs, inputs, halves, may_divide in TILED_WEIGHTS
    }
    variants = {
        (tile._replace(parts=min(tile.parts, 2)), halves)
        for tile, halves in tiles
        if tile is not None
    }
    for tile, halves in sorted(variants):
        inputs = tile.parts * tile.inputs * 8
        x = torch.empty(tile.tokens, inputs, dtype=torch.bfloat16)
        weight = torch.empty(halves * tile.outputs, inputs, dtype=torch.bfloat16)
        if halves == 2:
            gpu.tiled_silu(x, weight, tile)
            continue
        gpu.tiled_linear(x, weight, None, tile)
        gpu.tiled_linear(x, weight, x[0], tile)


def experts() -> None:
    """Compile for the sizes of Qwen3-30B-A3B, with a number of tokens for each kind of tile."""
    num_experts = 128
    each = 8
    width = 2048
    mlp_width = 768
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.empty(num_experts, 2 * mlp_width, width, dtype=dtype)
        down = torch.empty(num_experts, width, mlp_width, dtype=dtype)
        table = rule_table(num_experts, each)
        nums_of_tokens = table.nums_of_tokens
        if dtype == torch.float32:  # the largest tile is not for it: it spills
            nums_of_tokens.pop()
        for tokens in nums_of_tokens:
            x = torch.empty(tokens, width, dtype=dtype)
            logits = torch.empty(tokens, num_experts, dtype=dtype)
            weight = logits[:, :each].contiguous()
            expert = torch.empty(tokens, each, dtype=torch.int32)
            gpu.route(logits, weight, expert, tokens > 1, 0)
            tiles = table.find(tokens)
            if tiles is None:
                gpu.moe_by_token(x, gate_up, down, weight, expert, x)
            else:
                gpu.moe_by_expert(x, gate_up, down, weight, expert, x, tiles)


def cuda(nvcc: str, source: Path) -> None:
    """Compile the kernels of a file in CUDA.

    A kernel that may start before the kernel before it has ended must wait for that one.
    """
    include = [
        f"-I{source.parent}",
        f"-I{libinfo.find_include_path()}",
        f"-I{libinfo.find_dlpack_include_path()}",
    ]
    may_start_early = '"launch.cuh"' in source.read_text()
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernels.ptx"
        cubin = Path(folder) / "kernels.cubin"
        flags = [*kernels._CUDA_FLAGS, "-arch=sm_90a", *include]
        output_of(nvcc, *flags, "--ptx", str(source), "-o", str(ptx))
        usage = output_of(
            nvcc, "-arch=sm_90a", "-Xptxas", "-v", "--cubin", str(ptx), "-o", str(cubin)
        )
        size = cubin.stat().st_size
        code = {kernel.partition("(")[0]: kernel for kernel in ptx.read_text().split(".entry ")[1:]}
        sass = output_of(triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin))
    machine_code = {part.split()[0]: part for part in sass.split("Function : ")[1:]}
    for about in usage.split("Compiling entry function '")[1:]:
        symbol = about.partition("'")[0]
        plain = output_of("c++filt", symbol).replace("(anonymous namespace)::", "")
        name = re.search(r"(\w+(?:<[\w, ]+>)?)\(", plain)
        waits = "waits" if "griddepcontrol.wait" in code[symbol] else "does not wait"
        before_wait, wait, _ = machine_code[symbol].partition("ACQBULK")
        assert bool(wait) == (waits == "waits"), f"{plain} has another instruction for the wait"
        facts = [
            f"{size} bytes for all of {source.name}",
            f"{total_of('registers', about)} registers",
            f"{total_of('bytes smem', about)} of shared memory",
            f"{len(re.findall(' LDG(?:STS)?[.]', before_wait))} loads before it waits",
            f"{total_of('bytes (?:stack|spill)', about)} spilled of torch.bfloat16",
            waits if may_start_early else "follows",
        ]
        print(f"{name[1] if name else symbol}: {', '.join(facts)}")


def total_of(unit: str, text: str) -> int:
    """Add up all numbers in front of the unit."""
    return sum(map(int, re.findall(rf"(\d+) {unit}", text)))


def output_of(*command: str) -> str:
    done = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


if __name__ == "__main__":
    run = JITFunction.run
    JITFunction.run = compile_only
    triton.runtime.driver.set_active(NoDevice())
    launch._options = lambda device: {"PDL": True, "launch_pdl": True}
    launch.pdl.__globals__["torch"] = torch
    for module in (
        gpu.norm,
        gpu.activation,
        gpu.rotary,
        gpu.tables,
        gpu.mask,
        gpu.sample,
        gpu.linear,
        gpu.attention,
        gpu.prompt_attention,
        gpu.shared_prefix,
        gpu.expert_pairs,
        gpu.expert_products,
        gpu.experts,
        gpu.tiled_products,
    ):
        module.pdl = launch._options
    gpu.expert_products.has_tma = lambda x: True
    main()
    toolkit = find_cuda_toolkit()
    for source in sorted(kernels._SOURCES.glob("*.cu")) if toolkit else ():
        cuda(str(toolkit.nvcc), source)
