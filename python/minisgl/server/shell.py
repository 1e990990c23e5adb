"""A chat in the terminal, over the same frontend as the HTTP routes.

Owns the conversation. In a terminal, prompt_toolkit reads what is typed; from a pipe, lines are
read. Ctrl-C stops the answer, not the shell. When the conversation is longer than the context, its
oldest turns are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.patch_stdout import patch_stdout

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, RequestError
from minisgl.message import ChatMessage, Conversation, UserReply
from minisgl.server.frontend import Frontend
from minisgl.utils.standard_streams import write_out

_PROMPT = "you> "
# Control characters would be commands to the terminal. They are shown as replacement characters.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_VISIBLE = dict.fromkeys(_CONTROLS, "\ufffd")
_HELP = """Type a message and press Enter; Ctrl-C stops the answer.
  /reset   begin a new conversation
  /help    this text
  /exit    leave (or Ctrl-D)"""


class Shell:
    """One conversation.

    Args:
        read: waits for a line; raises EOFError at the end and KeyboardInterrupt at Ctrl-C.
        write: prints a piece of text at once; raises EOFError if its reader has gone.
        on_interrupt: what SIGINT does after an answer; during one it stops the answer.
    """

    def __init__(
        self,
        frontend: Frontend,
        model_name: str,
        sampling: SamplingParams,
        read: Callable[[], Awaitable[str]],
        write: Callable[[str], None],
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._frontend = frontend
        self._model_name = model_name
        self._sampling = sampling
        self._read = read
        self._write = write
        self._on_interrupt = on_interrupt
        self._turns: list[ChatMessage] = []

    async def run(self) -> None:
        """Talk until /exit or the end of the input or the output."""
        with contextlib.suppress(EOFError):
            self._write(f"Chat with {self._model_name}. /help lists the commands.\n")
            while True:
                try:
                    line = _visible_text(await self._read()).strip()
                except KeyboardInterrupt:
                    continue
                if line == "/exit":
                    return
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    await self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._turns.clear()
            self._write("A new conversation.\n")
        elif line == "/help":
            self._write(_HELP + "\n")
        else:
            self._write(f"Unknown command {line.split()[0]}; /help lists the commands.\n")

    async def _answer(self, line: str) -> None:
        """Stream an answer.

        The conversation keeps it as far as it came, and drops a message that is refused or whose
        answer is lost with a worker. The server starts workers again, or ends.
        """
        self._turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        answering = asyncio.create_task(self._stream(pieces))
        is_cancelled = _current_task().cancelling
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        is_full = False
        try:
            is_full = await answering
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._write(" [stopped]")
        except (RequestError, EngineFailed) as error:
            self._turns.pop()
            self._write(f"\n{error}\n" if pieces else f"{error}\n")
            return
        finally:
            answering.cancel()
            loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        self._write(" [cut off: the context is full]\n" if is_full else "\n")
        self._turns.append({"role": "assistant", "content": "".join(pieces)})
        if is_full and len(self._turns) > 2:  # the next answer needs room
            self._drop_oldest()

    async def _stream(self, pieces: list[str]) -> bool:
        """Show an answer; returns whether it ends where the context does.

        The oldest turns are dropped when an answer comes without them. A message that is too long
        by itself costs no turn.
        """
        num_left_out = 0
        while True:
            turns = self._turns[num_left_out:]
            generation = self._frontend.submit([Conversation(turns)], self._sampling)
            try:
                is_full = False
                async for _, reply in generation:
                    while len(self._turns) > len(turns):
                        self._drop_oldest()
                    self._show(reply, pieces)
                    is_full = reply.finish == "length"
                return is_full
            except RequestError as error:
                if error.code != "context_length_exceeded" or len(turns) < 3:
                    raise
                num_left_out += 2
            finally:
                generation.close()

    def _drop_oldest(self) -> None:
        del self._turns[:2]
        self._write("[the oldest turn is dropped: the conversation is longer than the context]\n")

    def _show(self, reply: UserReply, pieces: list[str]) -> None:
        pieces.append(reply.text)
        self._write(reply.text.translate(_VISIBLE))


async def run_shell(
    frontend: Frontend, model_name: str, sampling: SamplingParams, on_interrupt: Callable[[], None]
) -> None:
    """Chat on this process's terminal or standard input; see `Shell`.

    Raises:
        OutputFailed: standard output cannot be written.
    """

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may show few characters

    def write(text: str) -> None:
        try:
            write_out(text)
        except BrokenPipeError:  # who read it has gone
            raise EOFError from None

    read = _read_terminal() if sys.stdin.isatty() else _read_pipe()
    await Shell(frontend, model_name, sampling, read, write, on_interrupt).run()


def _visible_text(line: str) -> str:
    """What was typed, with ? in place of bytes that are no character: no message can carry them."""
    return line.encode(errors="replace").decode()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _read_terminal() -> Callable[[], Awaitable[str]]:
    session: PromptSession[str] = PromptSession(enable_suspend=True)

    async def read() -> str:
        with patch_stdout():
            return await session.prompt_async(_PROMPT)

    return read


def _read_pipe() -> Callable[[], Awaitable[str]]:
    """Lines of standard input. The thread that reads them does not keep the program alive."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(errors="replace")

    def read_lines() -> None:
        line = "start"
        while line:
            line = sys.stdin.readline()
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read_lines, daemon=True).start()

    async def read() -> str:
        line = await lines.get()
        if not line:
            raise EOFError
        return line

    return read
