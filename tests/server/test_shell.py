"""The chat, with a reader and a writer of the test and a fake worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import IO, Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import OutputFailed
from minisgl.message import AbortMsg, ReplyError, TokenizeMsg, UserReply
from minisgl.server import shell
from minisgl.server.frontend import Frontend
from minisgl.server.shell import Shell, run_shell
from tests.server.harness import FakeWorker, Script, run, running_frontend, wait_until

PARAMS = SamplingParams(temperature=0.0)
TOO_LONG = ReplyError(400, "context_length_exceeded", "too long for the context", "messages")


class Chat:
    """A shell that is being talked to."""

    def __init__(self, frontend: Frontend, worker: FakeWorker) -> None:
        self.frontend = frontend
        self.worker = worker
        self.shown = ""
        self._lines: asyncio.Queue[str | type[BaseException]] = asyncio.Queue()
        self._num_read = self._num_typed = 0
        self.shell = Shell(frontend, "m", PARAMS, self._read, self._write)
        self.running = asyncio.create_task(self.shell.run())

    async def _read(self) -> str:
        self._num_read += 1
        line = await self._lines.get()
        if isinstance(line, str):
            return line
        raise line

    def _write(self, text: str) -> None:
        self.shown += text

    @property
    def is_waiting(self) -> bool:
        """Whether the shell has handled all that was typed and asks for more."""
        return self._num_read > self._num_typed

    def type(self, line: str | type[BaseException]) -> None:
        self._num_typed += 1
        self._lines.put_nowait(line)

    async def send(self, line: str | type[BaseException]) -> str:
        """Type a line and wait until the shell asks for the next one; what it showed meanwhile."""
        before = len(self.shown)
        self.type(line)
        await wait_until(lambda: self.running.done() or self.is_waiting)
        return self.shown[before:]

    async def leave(self) -> None:
        self.type("/exit")
        await self.running


@asynccontextmanager
async def chatting(script: Script | None = None) -> AsyncIterator[Chat]:
    async with running_frontend() as (frontend, worker):
        if script:
            worker.answer_with(script)
        chat = Chat(frontend, worker)
        await wait_until(lambda: chat.is_waiting)
        try:
            yield chat
        finally:
            chat.running.cancel()
            await asyncio.gather(chat.running, return_exceptions=True)


def run_with_chat(
    scenario: Callable[[Chat], Coroutine[Any, Any, None]], script: Script | None = None
) -> None:
    async def run_scenario() -> None:
        async with chatting(script) as chat:
            await scenario(chat)
            assert chat.frontend.num_open == 0

    run(run_scenario())


def test_the_terminal_can_be_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ctrl-Z would be a character of the line."""
    options: dict[str, object] = {}
    monkeypatch.setattr(shell, "PromptSession", lambda **given: options.update(given))
    shell._read_terminal()
    assert options == {"enable_suspend": True}


def test_it_says_what_it_is_and_leaves_at_exit() -> None:
    async def scenario(chat: Chat) -> None:
        await chat.leave()
        assert chat.shown.startswith("Chat with m.")
        assert "/help" in chat.shown

    run_with_chat(scenario)


@pytest.mark.parametrize("line", [EOFError, " /exit \n"])
def test_the_end_of_the_input_and_exit_end_it(line: Any) -> None:
    async def scenario(chat: Chat) -> None:
        await chat.send(line)
        await chat.running

    run_with_chat(scenario)


def test_what_would_command_the_terminal_is_not_written() -> None:
    async def scenario(chat: Chat) -> None:
        chat.type("hi")
        msg = await chat.worker.receive()
        chat.worker.send(
            UserReply(msg.uid, "a\x1b[2J\x9b\x07\r\x7f\tb\n\u3000é👩‍👩‍👧", finish="stop")
        )
        await wait_until(lambda: chat.is_waiting)
        assert chat.shown.endswith("a\ufffd[2J\ufffd\ufffd\ufffd\ufffd\tb\n\u3000é👩‍👩‍👧\n")
        chat.type("again")
        again = await chat.worker.receive()
        assert "\x1b[2J" in again.prompt.messages[1]["content"], "the model sees what it said"
        chat.worker.send(UserReply(again.uid, finish="stop"))
        await wait_until(lambda: chat.is_waiting)
        await chat.leave()

    run_with_chat(scenario)


def test_the_answer_is_written_piece_by_piece() -> None:
    async def scenario(chat: Chat) -> None:
        chat.type("hi")
        msg = await chat.worker.receive()
        chat.worker.send(UserReply(msg.uid, "Hel"))
        await wait_until(lambda: chat.shown.endswith("Hel"))
        chat.worker.send(UserReply(msg.uid, "lo", finish="stop"))
        await wait_until(lambda: chat.shown.endswith("Hello\n"))
        await chat.leave()

    run_with_chat(scenario)


def test_every_turn_is_sent_with_all_turns_before_it() -> None:
    async def scenario(chat: Chat) -> None:
        prompts = []

        def script(msg: TokenizeMsg) -> list[UserReply]:
            prompts.append(msg.prompt.messages)
            assert msg.sampling == PARAMS
            return [UserReply(msg.uid, f"answer {len(prompts)}", finish="stop")]

        chat.worker.answer_with(script)
        await chat.send("  one \n")
        await chat.send("two")
        assert prompts == [
            [{"role": "user", "content": "one"}],
            [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "answer 1"},
                {"role": "user", "content": "two"},
            ],
        ]

    run_with_chat(scenario)


def test_bytes_that_are_no_character_are_not_sent() -> None:
    """A terminal's come as halves of surrogate pairs."""
    prompts = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        prompts.append(msg.prompt.messages[-1]["content"])
        return [UserReply(msg.uid, "ok", finish="stop")]

    async def scenario(chat: Chat) -> None:
        assert (await chat.send("a\udcff\udcfeb é")).endswith("ok\n")
        assert prompts == ["a??b é"]

    run_with_chat(scenario, script)


def test_reset_forgets_the_conversation() -> None:
    prompts: list[Any] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        prompts.append(msg.prompt.messages)
        return [UserReply(msg.uid, "ok", finish="stop")]

    async def scenario(chat: Chat) -> None:
        await chat.send("one")
        assert await chat.send("/reset")
        await chat.send("two")
        assert prompts[-1] == [{"role": "user", "content": "two"}]

    run_with_chat(scenario, script)


def test_help_lists_every_command() -> None:
    async def scenario(chat: Chat) -> None:
        shown = await chat.send("/help")
        assert all(command in shown for command in ("/reset", "/help", "/exit", "Ctrl-C"))

    run_with_chat(scenario)


@pytest.mark.parametrize("line", ["/", "/reste", "/exit now", "/ exit", "//", "/RESET"])
def test_an_unknown_command_is_named_and_goes_to_nobody(line: str) -> None:
    def script(msg: TokenizeMsg) -> list[UserReply]:
        raise AssertionError(f"{msg} was sent")

    async def scenario(chat: Chat) -> None:
        shown = await chat.send(line)
        assert line.split()[0] in shown
        assert "/help" in shown

    run_with_chat(scenario, script)


@pytest.mark.parametrize("line", ["", "   ", "\n", KeyboardInterrupt])
def test_an_empty_line_and_a_ctrl_c_at_the_prompt_do_nothing(line: Any) -> None:
    async def scenario(chat: Chat) -> None:
        assert await chat.send(line) == ""
        await chat.leave()

    run_with_chat(scenario)


def test_a_refused_message_is_said_and_not_kept() -> None:
    prompts: list[Any] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        prompts.append(msg.prompt.messages)
        if len(prompts) == 2:
            return [UserReply(msg.uid, error=ReplyError(400, "invalid_value", "that cannot be"))]
        return [UserReply(msg.uid, "ok", finish="stop")]

    async def scenario(chat: Chat) -> None:
        await chat.send("one")
        assert await chat.send("two") == "that cannot be\n"
        await chat.send("three")
        assert [turn["content"] for turn in prompts[-1]] == ["one", "ok", "three"]

    run_with_chat(scenario, script)


def test_when_the_context_is_full_the_oldest_turns_go_first() -> None:
    prompts: list[Any] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        prompts.append(msg.prompt.messages)
        if len(msg.prompt.messages) > 3:
            return [UserReply(msg.uid, error=TOO_LONG)]
        return [UserReply(msg.uid, f"to {msg.prompt.messages[-1]['content']}", finish="stop")]

    async def scenario(chat: Chat) -> None:
        await chat.send("one")
        await chat.send("two")
        shown = await chat.send("three")
        assert "dropped" in shown
        assert shown.endswith("to three\n")
        assert [turn["content"] for turn in prompts[-1]] == ["two", "to two", "three"]
        assert [turn["role"] for turn in prompts[-1]] == ["user", "assistant", "user"]

    run_with_chat(scenario, script)


def test_an_answer_that_fills_the_context_says_so_and_makes_room() -> None:
    prompts: list[Any] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        prompts.append(msg.prompt.messages)
        finish = "length" if len(prompts) == 2 else "stop"
        return [UserReply(msg.uid, f"to {msg.prompt.messages[-1]['content']}", finish=finish)]

    async def scenario(chat: Chat) -> None:
        await chat.send("one")
        shown = await chat.send("two")
        assert shown.startswith(
            "to two [cut off: the context is full]\n[the oldest turn is dropped"
        )
        await chat.send("go on")
        assert [turn["content"] for turn in prompts[-1]] == ["two", "to two", "go on"]

    run_with_chat(scenario, script)


def test_a_message_too_long_for_the_context_by_itself_is_refused_and_not_kept() -> None:
    def script(msg: TokenizeMsg) -> list[UserReply]:
        if "long" in msg.prompt.messages[-1]["content"]:
            return [UserReply(msg.uid, error=TOO_LONG)]
        return [UserReply(msg.uid, f"{len(msg.prompt.messages)} turns", finish="stop")]

    async def scenario(chat: Chat) -> None:
        await chat.send("one")
        assert await chat.send("a long one") == "too long for the context\n"
        assert await chat.send("two") == "3 turns\n", (
            "the refused message was dropped, and no old turn for it"
        )

    run_with_chat(scenario, script)


def test_ctrl_c_stops_the_answer_keeps_what_came_and_the_shell_goes_on() -> None:
    async def scenario(chat: Chat) -> None:
        chat.type("tell me")
        msg = await chat.worker.receive()
        chat.worker.send(UserReply(msg.uid, "once upon"))
        await wait_until(lambda: "once upon" in chat.shown)
        os.kill(os.getpid(), signal.SIGINT)
        assert await chat.worker.receive() == AbortMsg(msg.uid)
        await wait_until(lambda: chat.shown.endswith("[stopped]\n"))
        chat.type("go on")
        again = await chat.worker.receive()
        assert [turn["content"] for turn in again.prompt.messages] == [
            "tell me",
            "once upon",
            "go on",
        ]
        chat.worker.send(UserReply(again.uid, "a time", finish="stop"))
        await wait_until(lambda: chat.shown.endswith("a time\n"))
        await chat.leave()

    run_with_chat(scenario)


def test_ctrl_c_before_the_first_token_stops_too() -> None:
    async def scenario(chat: Chat) -> None:
        chat.type("tell me")
        msg = await chat.worker.receive()
        os.kill(os.getpid(), signal.SIGINT)
        assert await chat.worker.receive() == AbortMsg(msg.uid)
        await wait_until(lambda: chat.shown.endswith("[stopped]\n"))
        await chat.leave()

    run_with_chat(scenario)


def test_an_answer_that_is_lost_with_a_worker_is_said_and_the_chat_goes_on() -> None:
    """The server starts its workers again; it must not end with the chat."""

    async def scenario(chat: Chat) -> None:
        chat.type("hi")
        msg = await chat.worker.receive()
        chat.worker.send(UserReply(msg.uid, "Hel"))
        await wait_until(lambda: chat.shown.endswith("Hel"))
        chat.frontend.suspend("a scheduler died", outage_s=1)
        await wait_until(lambda: chat.is_waiting)
        assert chat.shown.endswith("Hel\nthe engine failed: a scheduler died\n")
        assert (await chat.send("hello?")).endswith("\n")
        await chat.leave()

    run_with_chat(scenario)


def test_cancelled_in_mid_answer_it_ends_and_aborts() -> None:
    async def scenario(chat: Chat) -> None:
        chat.type("hi")
        msg = await chat.worker.receive()
        chat.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await chat.running
        assert await chat.worker.receive() == AbortMsg(msg.uid)

    run_with_chat(scenario)


def pipe_that_nobody_reads() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


async def chat_with_nobody() -> None:
    async with running_frontend() as (frontend, _):
        await run_shell(frontend, "m", PARAMS, lambda: None)


def test_an_output_that_nobody_reads_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe_that_nobody_reads() as out, open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stdin", nothing)
        run(chat_with_nobody())


def test_an_output_that_cannot_be_written_ends_the_chat_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as out, open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(
            OutputFailed, match=r"^stdout cannot be written: No space left on device$"
        ):
            run(chat_with_nobody())
