"""Seconds from the command that starts a server until its /health answers, several times.

    python benchmark/offline/start.py [--repeat 3] [--out results.jsonl] --model FOLDER \\
        [flags of the server]

The first start fills the caches and is not counted.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from statistics import median

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.checkpoint import model_name
from minisgl.utils import detect_hardware


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def seconds_to_ready(flags: list[str], patience_s: float = 900.0) -> float:
    port = free_port()
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "--port", str(port), "--log-level", "WARNING", *flags]
    )
    try:
        while time.perf_counter() - began < patience_s:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    return time.perf_counter() - began
            except urllib.error.URLError:
                time.sleep(0.02)
        raise SystemExit(f"not ready after {patience_s:.0f} s")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--out", type=output_file, help="append figures to this file")
    parser.add_argument("--model", help="default: the default model")
    args, flags = parser.parse_known_args()
    flags += ["--model", args.model] if args.model else []
    first, *values = [round(seconds_to_ready(flags), 2) for _ in range(1 + args.repeat)]
    print(f"ready after {median(values):.2f} s; the first time {first:.2f} s; all others {values}")
    if args.out:
        device = detect_hardware().device
        figure = Figure(
            engine="minisgl",
            workload="start",
            model=model_name(args.model),
            device=device,
            metric="ready_s",
            values=values,
        )
        append_figures(args.out, [figure])


if __name__ == "__main__":
    main()
