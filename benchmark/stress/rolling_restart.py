"""Two servers behind a reverse proxy, restarted one after the other, and the effect on clients.

    python benchmark/stress/rolling_restart.py [--rounds 3] [--clients 8] [--proxy nginx] \\
        [--json FILE] [-- OPTIONS OF THE SERVERS]

Each client reads streams and whole answers through the proxy, one after the other. Meanwhile each
server in turn gets SIGTERM, lets its open requests end, exits and is started again. The run fails
if an exit code is not 0, or if a request is not answered.

The proxy is nginx with docs/operating/nginx.conf, another command, or `own`: the one of
`minisgl.benchmark.stress.proxy`, which does not need nginx. In a command, {conf} stands for a
configuration of nginx and {folder} for a folder that only the command uses.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import provenance
from minisgl.benchmark.stress.clients import Client, Tally, running
from minisgl.benchmark.stress.mix import Asker
from minisgl.benchmark.stress.processes import (
    StartedServer,
    exit_on_sigterm,
    wait_for_health,
    wait_until,
)
from minisgl.benchmark.stress.proxy import Proxy
from minisgl.benchmark.stress.target import Server
from minisgl.benchmark.stress.watch import context_of, num_engine_requests

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "operating" / "nginx.conf"
NGINX = "nginx -p {folder} -c {conf} -e stderr"
MODEL = "model"
DRAIN_TIMEOUT_S = "300"  # longer than any answer takes
KINDS = frozenset({"chat", "stream of a chat", "text", "stream of a text", "long answer"})
DRAIN_WITHIN_S = 330.0
AROUND = """\
daemon off;
pid {folder}/pid;
error_log stderr crit;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Restart:
    """One server's restart.

    Attributes:
        num_open: requests of the server when it got the signal.
        drained_s: until its end.
        back_s: from then until it was ready again.
    """

    server: int
    num_open: int
    exit_code: int
    drained_s: float
    back_s: float


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def start(port: int, options: list[str]) -> StartedServer:
    drain = ["--drain-timeout-s", DRAIN_TIMEOUT_S]
    return StartedServer([*drain, *options, "--served-model-name", MODEL, "--port", str(port)])


@contextmanager
def reverse_proxy(command: str, hosts: list[str]) -> Iterator[str]:
    """A proxy before the servers; yields its own address and port."""
    if command == "own":
        with Proxy(hosts) as proxy:
            yield proxy.host
            print(f"{proxy.num_sent_again} requests were sent to the other server")
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conf = folder / "nginx.conf"
        conf.write_text(AROUND.format(folder=folder))
        site = SITE.read_text().replace("listen 8000", f"listen 127.0.0.1:{port}")
        for documented, host in zip(("127.0.0.1:8001", "127.0.0.1:8002"), hosts, strict=True):
            site = site.replace(documented, host)
        (folder / "site.conf").write_text(site)
        words = shlex.split(command.format(conf=conf, folder=folder))
        with subprocess.Popen(words) as process:
            try:
                wait_for_health(f"127.0.0.1:{port}", expected=True)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


def restart(number: int, servers: list[StartedServer], port: int, options: list[str]) -> Restart:
    """Drain a server and start another at its port, in its place in the list."""
    server = servers[number]
    num_open = num_engine_requests(Server("127.0.0.1", port, MODEL))
    began_s = time.monotonic()
    server.process.terminate()
    exit_code = server.process.wait(DRAIN_WITHIN_S)
    drained_s = time.monotonic() - began_s
    servers[number] = start(port, options)
    servers[number].wait_ready()
    back_s = time.monotonic() - began_s - drained_s
    return Restart(number, num_open, exit_code, round(drained_s, 2), round(back_s, 2))


def make_clients(args: argparse.Namespace, host: str, tally: Tally) -> list[Client]:
    address, port = host.split(":")
    context = context_of(Server(address, int(port), MODEL))
    return [
        Client(
            host,
            Asker(random.Random(number), MODEL, context, args.max_tokens, only=KINDS),
            tally,
            share_left=0,
        )
        for number in range(args.clients)
    ]


def roll(args: argparse.Namespace, options: list[str], tally: Tally) -> list[Restart]:
    """Restart each server in turn under load."""
    ports = [free_port(), free_port()]
    restarts = []
    with ExitStack() as stack:
        servers = [stack.enter_context(start(port, options)) for port in ports]
        for server in servers:
            server.wait_ready()
        hosts = [server.host for server in servers]
        host = stack.enter_context(reverse_proxy(args.proxy, hosts))
        with running(make_clients(args, host, tally)):
            for _ in range(args.rounds):
                for number, port in enumerate(ports):
                    wait_for_answers(tally, args.clients)
                    restarts.append(restart(number, servers, port, options))
                    stack.enter_context(servers[number])
                    print(restarts[-1], flush=True)
            wait_for_answers(tally, args.clients)
    return restarts


def wait_for_answers(tally: Tally, num_more: int) -> None:
    """Wait until `num_more` requests have been answered, by both servers together."""
    enough = tally.count("answered") + num_more
    wait_until(lambda: tally.count("answered") >= enough, f"{num_more} more answers")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    proxy = NGINX if shutil.which("nginx") else "own"
    parser.add_argument("--rounds", type=positive, default=3, help="in each, both servers restart")
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--max-tokens", type=positive, default=64, help="of most answers")
    parser.add_argument("--proxy", default=proxy, help="own, nginx or a command")
    parser.add_argument(
        "--json", type=output_file, help="where a line with the results is appended"
    )
    parser.add_argument("server", nargs="*", help="after --: options of both servers")
    args = parser.parse_args()
    args.proxy = NGINX if args.proxy == "nginx" else args.proxy
    return args


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    made = provenance()
    tally = Tally()
    restarts = roll(args, args.server, tally)
    totals = Counter(dict.fromkeys(("answered", "told", "wrong", "hung"), 0))
    for (_, outcome), count in tally.outcomes.items():
        totals[outcome] += count
    num_failed = totals.total() - totals["answered"]
    is_clean = all(each.exit_code == 0 for each in restarts)
    print(f"{totals['answered']} requests were answered, {num_failed} failed")
    print("\n".join(tally.problems))
    if args.json:
        seen = {
            **made,
            "server": " ".join(args.server),
            "proxy": args.proxy,
            "num_clients": args.clients,
            "totals": dict(totals),
            "longest_s": round(tally.longest_s, 1),
            "restarts": [asdict(each) for each in restarts],
        }
        with args.json.open("a") as file:
            file.write(json.dumps(seen) + "\n")
    sys.exit(0 if num_failed == 0 and is_clean else 1)


if __name__ == "__main__":
    main()
