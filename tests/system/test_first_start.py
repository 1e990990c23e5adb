"""The first start on a machine, which compiles kernels while it loads weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.harness import MODEL, Program, small_server

# Six compilers work, beside those of other tests: it took more than 200 s on a slow machine.
COMPILED_S = 600.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * COMPILED_S)]


def test_the_first_start_answers_as_the_second_does(folder: Path, tmp_path: Path) -> None:
    """In bfloat16, of which all steps are compiled kernels, captured at the start."""
    answers = []
    for _ in range(2):
        argv = small_server(folder, "--dtype", "bfloat16")
        with Program(*argv, env={"MINISGL_CACHE": str(tmp_path)}) as server:
            server.wait_ready(COMPILED_S)
            with server.client() as client:
                answer = client.completions.create(
                    model=MODEL,
                    prompt="the dog",
                    temperature=0,
                    max_tokens=24,
                    extra_body={"ignore_eos": True},
                )
            answers.append(answer.choices[0].text)
    assert list((tmp_path / "kernels").glob("cpu-*.so"))
    assert answers[0] == answers[1]
