"""The loop of a tokenizer process: every message has its effect, and only ShutdownMsg ends it."""

from __future__ import annotations

import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import TokenizerOptions
from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError
from minisgl.message import (
    AbortMsg,
    BatchDetokenizeMsg,
    BatchFrontendMsg,
    ChatMessage,
    CodecReply,
    Conversation,
    DecodeMsg,
    DetokenizeMsg,
    EncodeMsg,
    EngineStats,
    ExitMsg,
    NewDetokenizerMsg,
    ReplyError,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.message.base import encode
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import PushQueue
from minisgl.processes.supervisor import Supervisor
from minisgl.tokenizer import Tokenizer, worker
from minisgl.tokenizer.worker import TokenizeWorker, _hide_torch, _num_characters
from tests.tokenizer.vocabularies import byte_fallback, byte_level

GREEDY = SamplingParams(temperature=0.0)
OPTIONS = TokenizerOptions()


class Inbox:
    """A queue whose messages come one after the other, or those of a list at a time.

    The worker must not read beyond them.
    """

    def __init__(self, *msgs: TokenizerMsg | list[TokenizerMsg]) -> None:
        self._msgs: Iterator[TokenizerMsg | list[TokenizerMsg]] = iter(msgs)

    def drain(self, *, block: bool = False) -> list[TokenizerMsg]:
        """While the worker has something to do, nothing more comes."""
        if not block:
            return []
        msgs = next(self._msgs)
        return msgs if isinstance(msgs, list) else [msgs]


class Outbox:
    def __init__(self) -> None:
        self.msgs: list[Any] = []

    def put(self, msg: Any) -> None:
        self.msgs.append(msg)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    return byte_fallback(tmp_path_factory.mktemp("tokenizer"))


def run(
    folder: Path, *msgs: TokenizerMsg | list[TokenizerMsg], max_seq_len: int = 1000
) -> tuple[list[Any], list[Any]]:
    """What the scheduler and the frontend get."""
    scheduler = Outbox()
    frontend = Outbox()
    worker = TokenizeWorker(folder, max_seq_len, scheduler, [frontend], OPTIONS)  # type: ignore[arg-type]
    worker.run(Inbox(*msgs))  # type: ignore[arg-type]
    return scheduler.msgs, frontend.msgs


def test_a_text_that_cannot_fit_is_refused_and_others_are_left_to_the_scheduler(
    tmp_path: Path,
) -> None:
    limit = 10
    longest = Tokenizer(byte_level(tmp_path)).length_check.max_token_bytes
    assert longest
    texts = ["x" * (limit * longest + 1), "x" * (limit * longest), "x"]
    conversation = Conversation([{"role": "user", "content": texts[0]}])
    prompts: list[Any] = [*texts, conversation]
    msgs = [TokenizeMsg(uid, prompt, GREEDY) for uid, prompt in enumerate(prompts)]
    to_scheduler, to_frontend = run(tmp_path, *msgs, ShutdownMsg(), max_seq_len=limit)
    assert [msg.uid for msg in to_scheduler] == [1, 2]
    assert [
        (reply.uid, reply.error.code, reply.error.status, reply.error.param)
        for reply in to_frontend
    ] == [
        (0, "context_length_exceeded", 400, None),
        (3, "context_length_exceeded", 400, None),
    ]
    assert str(limit) in to_frontend[0].error.message


@pytest.mark.parametrize(
    ("template", "warnings"),
    [
        (None, []),
        ("{{ raise_exception('no') }}", []),
        (
            "-\n{% foo %}",
            [
                "chats will be refused, the model's chat template is damaged: "
                "line 2: Encountered unknown tag 'foo'."
            ],
        ),
    ],
)
def test_a_template_that_is_none_is_one_line_of_the_log(
    template: str | None, warnings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    worker = TokenizeWorker(tmp_path, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]
    worker.get_ready_for_prompts()
    worker.warn(vocab_size=1000)
    assert caplog.messages == warnings


def test_a_template_that_asks_for_gigabytes_ends_the_start(tmp_path: Path) -> None:
    byte_level(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ 'x' * 10 ** 10 }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: .* takes more than 256 MiB"):
        TokenizeWorker(tmp_path, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for i in range(n|default(1)) %}{% for j in range(n|default(1)) %}"
            "{% endfor %}{% endfor %}",
            "it takes more than 0.5 s of a processor",
        ),
        ("{{ 'x' * (n|default(1) * 99999) }}", "it takes more than 64 MiB of memory"),
    ],
    ids=["time", "memory"],
)
def test_a_chat_for_which_the_template_takes_too_much_is_refused_and_the_next_is_served(
    template: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send the variables."""
    monkeypatch.setattr(worker, "_CHAT_CPU_S", 0.5)
    monkeypatch.setattr(worker, "_CHAT_BYTES", 2**26)
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    turns: list[ChatMessage] = [{"role": "user", "content": "-"}]
    costly = TokenizeMsg(1, Conversation(turns, variables={"n": 99_999}), GREEDY)
    usual = TokenizeMsg(2, Conversation(turns), GREEDY)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    (served,), (reply,) = run(tmp_path, costly, usual, ShutdownMsg(), max_seq_len=10**6)
    assert served.uid == 2
    assert (reply.uid, reply.error.status, reply.error.param) == (1, 400, "messages")
    assert reply.error.message == f"the model's chat template refuses the messages: {reason}"
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_refusal_of_the_template_is_sent_whatever_characters_it_has(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(r'{{ raise_exception("no \ud800") }}')
    chat = TokenizeMsg(1, Conversation([{"role": "user", "content": "a"}]), GREEDY)
    _, (reply,) = run(tmp_path, chat, ShutdownMsg())
    assert encode(reply)
    assert reply.error.message == r"the model's chat template refuses the messages: no \ud800"


@pytest.mark.parametrize(
    ("declared", "damage"),
    [
        (5, "it must be a text, got 5"),
        ({"default": "-", "tool_use": ["-"]}, "it must be a text, got ['-']"),
        (10**400, "it must be a text, got an integer of 1329 bits"),
        ({"rag": "-"}, "there are several, and none is named default"),
    ],
    ids=["number", "list", "long number", "other names"],
)
def test_what_is_declared_as_a_template_and_is_none_is_said_at_the_start_and_to_chats(
    declared: Any, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": declared}))
    worker = TokenizeWorker(tmp_path, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]
    worker.get_ready_for_prompts()
    worker.warn(vocab_size=1000)
    reason = f"the model's chat template is damaged: {damage}"
    assert caplog.messages == [f"chats will be refused, {reason}"]
    assert worker.info.chat_template is None
    chat = TokenizeMsg(1, Conversation([{"role": "user", "content": "a"}]), GREEDY)
    _, (reply,) = run(tmp_path, chat, ShutdownMsg())
    assert reply.error.message == f"the chat is not possible, {reason}"


def warn_of_templates(folder: Path, declared: dict[str, str]) -> None:
    """Start a worker on a tokenizer with these templates, as far as it warns of them."""
    byte_level(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": declared}))
    worker = TokenizeWorker(folder, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]
    worker.warn(vocab_size=1000)


@pytest.mark.parametrize(
    ("declared", "consequence"),
    [
        ({"default": "-", "tool_use": "-\n{% foo %}"}, "a system message describes tools"),
        ({"tool_use": "-\n{% foo %}"}, "chats with tools will be refused"),
        ({"default": "-", "tool_use": "{{ raise_exception('no') }}"}, None),
        ({"default": "-", "tool_use": "{{ tools }}", "rag": "{% foo %}"}, None),
    ],
    ids=["beside another", "alone", "refuses", "good"],
)
def test_a_damaged_template_for_tools_is_said_at_the_start_with_its_consequence(
    declared: dict[str, str],
    consequence: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_templates(tmp_path, declared)
    damage = "line 2: Encountered unknown tag 'foo'."
    reason = f"the model's chat template for tools is damaged: {damage}"
    expected = [] if consequence is None else [f"{consequence}, {reason}"]
    assert [line for line in caplog.messages if "for tools is damaged" in line] == expected
    question: ChatMessage = {"role": "user", "content": "a"}
    chat = TokenizeMsg(1, Conversation([question], tools=[{"name": "f"}]), GREEDY)
    _, replies = run(tmp_path, chat, ShutdownMsg())
    is_refused = bool(replies) and "is damaged" in replies[0].error.message
    assert is_refused == (consequence == "chats with tools will be refused")


@pytest.mark.parametrize(
    ("declared", "said", "refused"),
    [
        (
            {"default": "{% foo %}", "tool_use": "{{ tools }}"},
            ["chats without tools will be refused, the model's chat template is damaged"],
            {"plain"},
        ),
        (
            {"default": "{% foo %}", "tool_use": "shows none"},
            ["chats will be refused, the model's chat template is damaged"],
            {"plain", "tools"},
        ),
        (
            {"default": "{% foo %}", "tool_use": "{% foo %}"},
            [
                "chats will be refused, the model's chat template is damaged",
                "chats with tools will be refused, the model's chat template for tools is damaged",
            ],
            {"plain", "tools"},
        ),
        (
            {"default": "-", "tool_use": "{% foo %}"},
            ["a system message describes tools, the model's chat template for tools is damaged"],
            set(),
        ),
        ({"default": "-", "tool_use": "{{ tools }}", "rag": "{% foo %}"}, [], set()),
    ],
    ids=["default", "default, other hides tools", "both", "for tools", "neither"],
)
def test_of_several_templates_the_start_says_which_chats_a_damaged_one_costs(
    declared: dict[str, str],
    said: list[str],
    refused: set[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_templates(tmp_path, declared)
    assert caplog.messages == [f"{each}: line 1: Encountered unknown tag 'foo'." for each in said]
    turns: list[ChatMessage] = [{"role": "user", "content": "a"}]
    chats = {"plain": Conversation(turns), "tools": Conversation(turns, tools=[{"name": "f"}])}
    served = set()
    for kind, chat in chats.items():
        messages, _ = run(tmp_path, TokenizeMsg(1, chat, GREEDY), ShutdownMsg(), max_seq_len=10**4)
        if messages:
            served.add(kind)
    assert served == chats.keys() - refused


@pytest.mark.parametrize("template", ["{{ tools }}", "-"], ids=["shows tools", "shows none"])
def test_a_template_for_tools_alone_serves_chats_with_tools(
    template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    declared = [{"name": "tool_use", "template": template}, {"name": "rag", "template": "-"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": declared}))
    worker = TokenizeWorker(tmp_path, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]
    worker.get_ready_for_prompts()
    worker.warn(vocab_size=1000)
    reason = "the model has a chat template for tools, and none is named default"
    assert caplog.messages == [f"chats without tools will be refused: {reason}"]
    turns: list[ChatMessage] = [{"role": "user", "content": "a"}]
    with_tools = TokenizeMsg(1, Conversation(turns, tools=[{}]), GREEDY)
    without = TokenizeMsg(2, Conversation(turns), GREEDY)
    (served,), (reply,) = run(tmp_path, with_tools, without, ShutdownMsg())
    assert served.uid == 1
    assert (reply.uid, reply.error.status, reply.error.param) == (2, 400, "messages")
    assert reply.error.message == f"chats without tools are not possible: {reason}"


def test_a_tokenizer_with_more_tokens_than_the_model_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level(tmp_path)
    worker = TokenizeWorker(tmp_path, 100, Outbox(), [], OPTIONS)  # type: ignore[arg-type]
    last_id = max(worker.info.added_tokens.values())
    worker.warn(vocab_size=last_id + 1)
    assert caplog.messages == []
    worker.warn(vocab_size=last_id)
    (line,) = caplog.messages
    assert f"ids up to {last_id}, and the model only ids below {last_id}" in line


def test_a_prompt_goes_to_the_backend_as_ids(folder: Path) -> None:
    (msg,), to_frontend = run(
        folder, TokenizeMsg(4, TokenIds(pack_ids([5, 6])), GREEDY), ShutdownMsg()
    )
    assert isinstance(msg, UserMsg)
    assert (msg.uid, unpack_ids(msg.input_ids).tolist(), msg.sampling) == (4, [5, 6], GREEDY)
    assert to_frontend == []


def test_a_refused_prompt_is_answered_and_the_next_is_served(folder: Path) -> None:
    chat = TokenizeMsg(1, Conversation([{"role": "user", "content": "a"}]), GREEDY)
    to_scheduler, (reply,) = run(folder, chat, TokenizeMsg(2, "a", GREEDY), ShutdownMsg())
    assert isinstance(reply, UserReply)
    assert (reply.uid, reply.is_final) == (1, True)
    assert reply.error is not None
    assert (reply.error.status, reply.error.param) == (400, "messages")
    assert [msg.uid for msg in to_scheduler] == [2]


def test_a_worker_reports_its_chat_template_and_added_tokens(folder: Path) -> None:
    info = TokenizeWorker(folder, 1000, Outbox(), [], OPTIONS).info  # type: ignore[arg-type]
    assert info.chat_template is None
    assert info.added_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_an_abort_follows_its_request(folder: Path) -> None:
    to_scheduler, _ = run(folder, TokenizeMsg(1, "a", GREEDY), AbortMsg(1), ShutdownMsg())
    assert [type(msg) for msg in to_scheduler] == [UserMsg, AbortMsg]
    assert to_scheduler[1].uid == 1


def test_an_abort_drops_what_waits_before_the_backend_sees_it(folder: Path) -> None:
    waiting: list[TokenizerMsg] = [
        TokenizeMsg(1, "a", GREEDY),
        TokenizeMsg(2, "a", GREEDY),
        EncodeMsg(3, "a"),
        AbortMsg(2),
        AbortMsg(3),
    ]
    to_scheduler, to_frontend = run(folder, waiting, ShutdownMsg())
    assert [(type(msg), msg.uid) for msg in to_scheduler] == [(UserMsg, 1)]
    assert to_frontend == [UserReply(2, finish="abort")], "a prompt has one final reply"


def test_short_prompts_and_outputs_do_not_wait_for_long_ones(folder: Path) -> None:
    long = "a" * 900
    waiting: list[TokenizerMsg] = [
        EncodeMsg(1, long),
        TokenizeMsg(2, Conversation([{"role": "user", "content": long}]), GREEDY),
        TokenizeMsg(3, long, GREEDY),
        TokenizeMsg(4, "a", GREEDY),
        BatchDetokenizeMsg([DetokenizeMsg(9, [260])]),
    ]
    to_scheduler, to_frontend = run(folder, waiting, ShutdownMsg())
    assert [msg.uid for msg in to_scheduler] == [4, 3]
    assert [type(msg) for msg in to_frontend] == [BatchFrontendMsg, CodecReply, UserReply]


@pytest.mark.parametrize(
    "chat",
    [
        Conversation([{"role": "user", "content": "x"}], tools=[{"function": {"name": "a" * 900}}]),
        Conversation([{"role": "user", "content": "x"}], variables={"documents": ["a" * 900]}),
        Conversation([{"role": "assistant", "tool_calls": [{"arguments": {"a" * 900: 1}}]}]),
        Conversation([{"role": "user", "content": ""}] * 20),
    ],
    ids=["tools", "variables", "calls", "turns"],
)
def test_a_short_prompt_does_not_wait_for_whatever_a_template_writes(
    chat: Conversation, folder: Path
) -> None:
    waiting: list[TokenizerMsg] = [
        TokenizeMsg(1, chat, GREEDY),
        EncodeMsg(2, "a" * 300),
        EncodeMsg(3, "a"),
    ]
    _, to_frontend = run(folder, waiting, ShutdownMsg())
    assert [msg.uid for msg in to_frontend] == [3, 2, 1]


def test_a_prompt_of_ids_waits_by_its_length(folder: Path) -> None:
    waiting: list[TokenizerMsg] = [
        TokenizeMsg(1, TokenIds(pack_ids([5] * 900)), GREEDY),
        TokenizeMsg(2, "a" * 50, GREEDY),
        TokenizeMsg(3, TokenIds(pack_ids([5])), GREEDY),
    ]
    to_scheduler, _ = run(folder, waiting, ShutdownMsg())
    assert [msg.uid for msg in to_scheduler] == [3, 2, 1]


def test_the_cost_of_a_prompt_counts_strings_at_any_depth() -> None:
    nested: Any = "abc"
    for _ in range(5000):
        nested = [{"k": nested}]
    assert _num_characters(nested) == 3 + 5000


def test_a_request_of_many_prompts_takes_turns_with_another(folder: Path) -> None:
    many: list[TokenizerMsg] = [TokenizeMsg(uid, "ab", GREEDY, first_uid=1) for uid in range(1, 6)]
    to_scheduler, _ = run(folder, [*many, TokenizeMsg(6, "ab", GREEDY)], ShutdownMsg())
    assert [msg.uid for msg in to_scheduler] == [1, 6, 2, 3, 4, 5]


def test_questions_have_the_bound_of_prompts(folder: Path) -> None:
    limit = 10
    texts = ["x" * 40_000, "x" * 15]
    questions = [EncodeMsg(uid, text) for uid, text in enumerate(texts)]
    _, (refused, answered) = run(folder, *questions, ShutdownMsg(), max_seq_len=limit)
    assert refused.error.code == "context_length_exceeded"
    assert "maximum context length is 10 tokens." in refused.error.message
    assert answered.error is None


def test_replies_of_one_step_go_to_the_frontend_in_one_message(folder: Path) -> None:
    outputs = [DetokenizeMsg(1, [260], num_prompt=3), DetokenizeMsg(2, finish="abort")]
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 8)
    to_scheduler, (batch, more) = run(
        folder, BatchDetokenizeMsg(outputs), BatchDetokenizeMsg([], stats), ShutdownMsg()
    )
    assert isinstance(batch, BatchFrontendMsg)
    assert (batch.stats, more) == (None, BatchFrontendMsg([], stats))
    assert [(reply.uid, reply.text, reply.finish) for reply in batch.replies] == [
        (1, "a", None),
        (2, "", "abort"),
    ]
    assert to_scheduler == []


def test_each_api_process_gets_the_replies_to_its_requests_and_all_statistics(folder: Path) -> None:
    uids = [4, 3, 7, 1]
    outputs = [DetokenizeMsg(uid, [260]) for uid in uids]
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 8)
    frontends = [Outbox(), Outbox(), Outbox()]
    worker = TokenizeWorker(folder, 1000, Outbox(), frontends, OPTIONS)  # type: ignore[arg-type]
    worker.run(
        Inbox(  # type: ignore[arg-type]
            BatchDetokenizeMsg(outputs),
            BatchDetokenizeMsg([], stats),
            EncodeMsg(5, "a"),
            TokenizeMsg(8, "a" * 10**5, GREEDY),
            ShutdownMsg(),
        )
    )
    replied = [
        [reply.uid for reply in frontend.msgs[0].replies] if number < 2 else []
        for number, frontend in enumerate(frontends)
    ]
    assert replied == [[3], [4, 7, 1], []]
    assert all(BatchFrontendMsg([], stats) in frontend.msgs for frontend in frontends)
    assert [(type(msg), msg.uid) for msg in frontends[2].msgs[1:]] == [
        (CodecReply, 5),
        (UserReply, 8),
    ]


def test_a_detokenizer_aborts_answers_whose_beginning_it_has_not_seen(folder: Path) -> None:
    """An earlier one has had it. What ends them there is no reply, but an error is."""
    lost = [
        DetokenizeMsg(1, [260], is_first=False),
        DetokenizeMsg(2, [260], finish="length", is_first=False),
        DetokenizeMsg(3, finish="abort", is_first=False),
        DetokenizeMsg(4, error=ReplyError(400, "c", "the grammar is too large"), is_first=False),
    ]
    seen = [DetokenizeMsg(5, [260]), DetokenizeMsg(5, [260], finish="length", is_first=False)]
    to_scheduler, (batch,) = run(folder, BatchDetokenizeMsg(lost + seen), ShutdownMsg())
    assert to_scheduler == [AbortMsg(1)]
    assert [(reply.uid, reply.text, reply.is_final) for reply in batch.replies] == [
        (4, "", True),
        (5, "a", False),
        (5, "a", True),
    ]


def test_a_new_detokenizer_is_announced_before_jobs_that_wait(folder: Path) -> None:
    msgs: list[TokenizerMsg] = [TokenizeMsg(1, "a", GREEDY), NewDetokenizerMsg(1)]
    to_scheduler, _ = run(folder, msgs, ShutdownMsg())
    assert [type(msg) for msg in to_scheduler] == [NewDetokenizerMsg, UserMsg]


def test_questions_are_answered_without_the_backend(folder: Path) -> None:
    to_scheduler, replies = run(
        folder,
        EncodeMsg(1, "ab", add_special_tokens=False),
        EncodeMsg(2, Conversation([{"role": "user", "content": "a"}])),
        DecodeMsg(3, pack_ids([10**6])),
        DecodeMsg(4, pack_ids(Tokenizer(folder).encode("ab", add_special_tokens=False))),
        ShutdownMsg(),
    )
    assert to_scheduler == []
    assert all(isinstance(reply, CodecReply) for reply in replies)
    assert [reply.uid for reply in replies] == [1, 2, 3, 4]
    assert unpack_ids(replies[0].ids).tolist() == Tokenizer(folder).encode("ab").tolist()[1:]
    assert [reply.error and (reply.error.status, reply.error.param) for reply in replies] == [
        None,
        (400, "messages"),
        (400, None),
        None,
    ]
    assert replies[3].text == "ab"


def test_what_came_before_a_shutdown_is_done_before_the_scheduler_stops(folder: Path) -> None:
    msgs: list[TokenizerMsg] = [
        TokenizeMsg(1, "a", GREEDY),
        TokenizeMsg(2, "a", GREEDY),
        EncodeMsg(3, "a"),
        ShutdownMsg(stops_scheduler=True),
    ]
    to_scheduler, to_frontend = run(folder, msgs)
    assert [type(msg) for msg in to_scheduler] == [UserMsg, UserMsg, ExitMsg]
    assert [msg.uid for msg in to_frontend] == [3]


@pytest.mark.parametrize("stops_scheduler", [False, True])
def test_only_one_tokenizer_stops_the_scheduler(folder: Path, stops_scheduler: bool) -> None:
    to_scheduler, to_frontend = run(folder, ShutdownMsg(stops_scheduler=stops_scheduler))
    assert to_scheduler == ([ExitMsg()] if stops_scheduler else [])
    assert to_frontend == []


def test_a_process_ends_at_once_though_api_processes_that_have_ended_read_no_replies(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second of waiting for each of them would be more than the supervisor waits."""
    caplog.set_level(logging.DEBUG, "minisgl.processes.supervisor")
    with private_folder() as ipc:
        addresses = Addresses(ipc, num_tokenizer=1, num_api=12)
        with Supervisor("WARNING") as supervisor:
            inbox = addresses.detokenizer
            body = "minisgl.tokenizer:tokenize_worker"
            supervisor.start("detokenizer", body, folder, 1000, inbox, addresses, OPTIONS)
            supervisor.wait_ready(timeout_s=120)
            to_all = BatchDetokenizeMsg([], EngineStats(1, 2, 3, 4, 5, 6, 7, 8))
            scheduler: PushQueue[TokenizerMsg] = PushQueue(inbox, encode)
            scheduler.put(to_all)
            scheduler.put(ShutdownMsg())
            scheduler.close()
    assert "detokenizer is killed" not in caplog.messages


def test_a_tokenizer_that_is_written_down_is_read_without_a_list_of_all_models(
    tmp_path: Path,
) -> None:
    """transformers takes a third of a second to import that, in each tokenizer process."""
    byte_level(tmp_path)
    script = """
import sys
from pathlib import Path
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.worker import _hide_torch
_hide_torch()
tokenizer = Tokenizer(Path(sys.argv[1]))
tokenizer.get_ready()
tokenizer.make_detokenizer().get_ready()
print("transformers" in sys.modules, "transformers.models.auto" in sys.modules)
"""
    command = [sys.executable, "-c", script, tmp_path]
    printed = subprocess.check_output(command, text=True)
    assert printed.split() == ["True", "False"]


def test_a_main_module_may_have_imported_torch_before() -> None:
    _hide_torch()
    assert sys.modules["torch"] is torch
