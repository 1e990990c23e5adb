"""The cost of a token, and of a request, in each process of the server, without a model.

    python benchmark/token_path.py [--streams 256] [--rate 20] [--out results.jsonl]

The server is real: API processes, tokenizer and detokenizer, with their queues and sockets. This
process stands in for the scheduler: it takes the tokenized prompts and sends one token per step to
each stream. Another process has the streams' connections, reads all events, and counts them.

Costs are processor times, user and system, as the kernel counts them for each process, so other
programs on the machine matter little. A stream that is behind gets several tokens as one event. So
a cost is that of single tokens only if there are as many events as tokens; the table shows both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.benchmark.arguments import factor, output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.config import TokenizerOptions
from minisgl.message import (
    BatchDetokenizeMsg,
    DetokenizeMsg,
    EndMsg,
    PeerMsg,
    SchedulerMsg,
    ServeMsg,
    TokenizerMsg,
    UserMsg,
    decoder,
    encode,
    unpack_ids,
)
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.processes.supervisor import Supervisor
from minisgl.server.args import ServerConfig
from minisgl.server.capacity import BACKLOG, raise_descriptor_limit
from minisgl.worker_info import SchedulerInfo, decode_info

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "benchmark" / "models"
CONTEXT = 100_000
VOCABULARY = 8192
SETTLE_S = 1.0  # after a phase, until all its events are read
MODEL = "none"
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_END = b"data: [DONE]"
_EVENT = b"data: "
_IN_KERNEL = ", in the kernel"


# The server.


@contextmanager
def running_server(
    folder: Path, num_api: int
) -> Iterator[tuple[Addresses, tuple[str, int], dict[str, list[psutil.Process]]]]:
    """A server without a scheduler and without the parent of its processes.

    Yields:
        its addresses, that of its port, and the processes by their roles.
    """
    with (
        private_folder() as ipc,
        socket.socket(proto=socket.IPPROTO_TCP) as listener,
        Supervisor("WARNING") as supervisor,
    ):
        listener.bind(("127.0.0.1", 0))
        addresses = Addresses(ipc, num_tokenizer=1, num_api=num_api)
        inboxes = {"detokenizer": addresses.detokenizer, "tokenizer": addresses.tokenizers[0]}
        for name, inbox in inboxes.items():
            body = "minisgl.tokenizer:tokenize_worker"
            supervisor.start(name, body, folder, CONTEXT, inbox, addresses, TokenizerOptions())
        config = ServerConfig(
            model=str(folder),
            served_model_name=MODEL,
            api_workers=num_api,
            max_connections=4096,
            log_level="WARNING",
        )
        for api in range(num_api):
            body = "minisgl.server.api_worker:api_worker"
            supervisor.start(f"api-{api}", body, config, addresses, api, listener)
        reports = supervisor.wait_ready(timeout_s=120)
        listener.listen(BACKLOG)
        tokenizers = [decode_info(report.info) for report in reports if report.info]
        start = ServeMsg([*tokenizers, SchedulerInfo(CONTEXT, "cpu")], 0, b"secret")
        peers = [PushQueue[PeerMsg](address, encode) for address in addresses.peers]
        try:
            for peer in peers:
                peer.put(start)
            yield addresses, listener.getsockname(), children_by_kind()
        finally:
            for peer in peers:
                peer.put(EndMsg("the benchmark is done"))
                peer.close()
            supervisor.kill()


def children_by_kind() -> dict[str, list[psutil.Process]]:
    kinds: dict[str, list[psutil.Process]] = {"API": [], "tokenizer": [], "detokenizer": []}
    for child in psutil.Process().children():
        kind = "API" if child.name().startswith("api-") else child.name()
        if kind in kinds:
            kinds[kind].append(child)
    return kinds


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer, trained on this project's documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train_from_iterator([corpus()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text((MODELS / "qwen3-0.6b" / "config.json").read_text())


def corpus() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


# The clients.


@dataclass(frozen=True)
class Received:
    """The sums over all streams."""

    num_events: int
    num_bytes: int


def run_clients(address: tuple[str, int], path: str, num_streams: int, pipe: Connection) -> None:
    """Body of the clients' process: ask, read all answers, report what was received."""
    body = json.dumps(request_body(path))
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        client = socket.create_connection(address)
        selector.register(client, selectors.EVENT_READ)
    pipe.send("connected")
    pipe.recv()
    for key in list(selector.get_map().values()):
        key.fileobj.sendall(request)  # type: ignore[union-attr]
    pipe.send(read_to_end(selector, num_streams))


def request_body(path: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "a question of some words"}
    if path == PATHS["chat"]:
        prompt = {"messages": [{"role": "user", "content": "a question of some words"}]}
    return {"model": MODEL, "stream": True, "max_tokens": CONTEXT // 2, **prompt}


def read_to_end(selector: selectors.BaseSelector, num_streams: int) -> Received:
    num_events = 0
    num_bytes = 0
    while num_streams:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            num_events += data.count(_EVENT)
            num_bytes += len(data)
            if not data or _END in data:
                selector.unregister(key.fileobj)
                num_streams -= 1
    return Received(num_events, num_bytes)


# The scheduler.


class FakeScheduler:
    """Takes prompts and sends tokens. All prompts get a token at the same steps.

    Args:
        tokens: of an answer, repeated as often as needed.
    """

    def __init__(self, addresses: Addresses, tokens: Sequence[int]) -> None:
        self._inbox: PullQueue[SchedulerMsg] = PullQueue(addresses.scheduler, decoder(SchedulerMsg))
        self._outbox = PushQueue[TokenizerMsg](addresses.detokenizer, encode)
        self._tokens = tokens
        self._uids: list[int] = []
        self._num_prompt = 0
        self._num_steps = 0

    def admit(self, num_prompts: int) -> None:
        while len(self._uids) < num_prompts:
            msg = self._inbox.get()
            assert isinstance(msg, UserMsg)
            self._uids.append(msg.uid)
            self._num_prompt = len(unpack_ids(msg.input_ids))

    def step(self, *, is_last: bool = False) -> None:
        token = self._tokens[self._num_steps % len(self._tokens)]
        self._num_steps += 1
        outputs = [
            DetokenizeMsg(
                uid,
                [token],
                finish="length" if is_last else None,
                num_prompt=self._num_prompt,
            )
            for uid in self._uids
        ]
        self._outbox.put(BatchDetokenizeMsg(outputs))
        if is_last:
            self._uids.clear()

    def run(self, num_steps: int, rate: float) -> None:
        """Send steps at a rate per second."""
        started = time.perf_counter()
        for number in range(num_steps):
            time.sleep(max(0.0, started + number / rate - time.perf_counter()))
            self.step()

    def close(self) -> None:
        self._outbox.close()
        self._inbox.close()


# Measuring.


@dataclass(frozen=True)
class Costs:
    """Microseconds on the processor, by process."""

    per_request: dict[str, float]
    per_token: dict[str, float]
    received: Received


class CpuClock:
    """The processor time of a server's processes, by their roles."""

    def __init__(self, processes: dict[str, list[psutil.Process]]) -> None:
        self._processes = processes

    def read(self) -> dict[str, float]:
        """Seconds since the processes began, and those of them that the kernel took."""
        seconds = {}
        for name, processes in self._processes.items():
            spent = [process.cpu_times() for process in processes]
            in_kernel = sum(times.system for times in spent)
            seconds[name] = in_kernel + sum(times.user for times in spent)
            seconds[f"{name}{_IN_KERNEL}"] = in_kernel
        return seconds


def difference_us(
    before: dict[str, float], after: dict[str, float], divisor: int
) -> dict[str, float]:
    return {name: 1e6 * (after[name] - before[name]) / divisor for name in before}


def wait_until_serving(address: tuple[str, int]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError("the server does not listen")


def measure(
    clock: CpuClock,
    scheduler: FakeScheduler,
    address: tuple[str, int],
    args: argparse.Namespace,
) -> Costs:
    pipe, far_end = multiprocessing.Pipe()
    client_args = (address, PATHS[args.endpoint], args.streams, far_end)
    clients = multiprocessing.get_context("spawn").Process(target=run_clients, args=client_args)
    clients.start()
    pipe.recv()
    times = [clock.read()]
    pipe.send("go")
    scheduler.admit(args.streams)
    scheduler.step()
    time.sleep(SETTLE_S)
    times.append(clock.read())
    scheduler.run(args.steps, args.rate)
    time.sleep(SETTLE_S)
    times.append(clock.read())
    scheduler.step(is_last=True)
    received = pipe.recv()
    time.sleep(SETTLE_S)
    times.append(clock.read())
    clients.join()
    begin = difference_us(times[0], times[1], args.streams)
    stream = difference_us(times[1], times[2], args.streams * args.steps)
    end = difference_us(times[2], times[3], args.streams)
    return Costs({name: begin[name] + end[name] for name in begin}, stream, received)


def median(costs: Sequence[dict[str, float]], name: str) -> tuple[float, list[float]]:
    values = [cost[name] for cost in costs]
    return statistics.median(values), values


def report(runs: list[Costs], num_tokens: int) -> None:
    print(f"{'':26} {'µs a token':>24} {'µs a request':>30}")
    for name in runs[0].per_token:
        token, tokens = median([run.per_token for run in runs], name)
        request, requests = median([run.per_request for run in runs], name)
        token_range = f"({min(tokens):.1f} to {max(tokens):.1f})"
        request_range = f"({min(requests):.0f} to {max(requests):.0f})"
        print(f"{name:26} {token:8.1f} {token_range:>15} {request:12.0f} {request_range:>17}")
    events = [run.received.num_events for run in runs]
    print(f"{num_tokens} tokens came as {min(events)} to {max(events)} events")


def figures(runs: list[Costs], workload: str) -> list[Figure]:
    return [
        Figure(
            engine="minisgl",
            workload=f"{workload}, {name}",
            model=MODEL,
            device="cpu",
            metric=metric,
            values=[round(cost[name], 2) for cost in costs],
        )
        for metric, costs in {
            "us_a_token": [run.per_token for run in runs],
            "us_a_request": [run.per_request for run in runs],
        }.items()
        for name in runs[0].per_token
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=positive, default=256, help="streams at a time")
    parser.add_argument("--steps", type=positive, default=100, help="tokens of each stream")
    parser.add_argument("--rate", type=factor, default=20, help="steps a second")
    parser.add_argument("--endpoint", choices=PATHS, default="chat")
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--api-workers", type=positive, default=1)
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer; else one is trained")
    parser.add_argument(
        "--out", type=output_file, help="a file of JSON lines to add the figures to"
    )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    raise_descriptor_limit()
    with TemporaryDirectory() as name:
        folder = args.model or Path(name)
        if args.model is None:
            write_tokenizer(folder)
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(corpus()).ids
        with running_server(folder, args.api_workers) as (addresses, address, processes):
            scheduler = FakeScheduler(addresses, tokens)
            wait_until_serving(address)
            clock = CpuClock(processes)
            runs = [measure(clock, scheduler, address, args) for _ in range(args.repetitions + 1)]
            scheduler.close()
    runs = runs[1:]  # the first one builds routes and the like
    report(runs, args.streams * (args.steps + 2))
    if args.out:
        workload = f"{args.streams} streams of /{args.endpoint} at {args.rate:g} steps a second"
        append_figures(args.out, figures(runs, workload))


if __name__ == "__main__":
    main()
