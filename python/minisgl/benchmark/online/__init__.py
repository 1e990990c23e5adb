"""Load for any OpenAI-compatible server, and its results. Needs `minisgl[bench]`.

    workloads.py  schedules of requests: which prompt, how many tokens, when
    traces.py     the files of recorded arrivals
    prompts.py    from blocks of a prompt to token ids or text
    records.py    when things happened to one request
    sse.py        server-sent events, as they come
    client.py     connections, and one request on one of them
    load.py       client processes, and the load that they make together
    processes.py  the processor time of the server's processes
    report.py     percentiles, throughput, goodput
    tables.py     figures as text
    plots.py      plots

The command is `python -m minisgl.benchmark.serve`.
"""

__all__: list[str] = []
