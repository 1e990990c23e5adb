"""Prompts of all kinds to ids: special tokens once, and refusals that name what is wrong."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as WrittenTokenizer

from minisgl.errors import CheckpointError, InvalidRequest, RequestError
from minisgl.message import Conversation, TokenIds, pack_ids
from minisgl.tokenizer import Tokenizer
from tests.checkpoints import BOS_ID, IM_END_ID, IM_START_ID, add_python
from tests.tokenizer.vocabularies import byte_fallback, byte_level, metaspace

TURN = {"role": "user", "content": "the dog"}


def with_template(folder: Path, template: str | None) -> Tokenizer:
    """The byte-level tokenizer with another chat template, or without."""
    byte_level(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_text_gets_the_models_first_token_once(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer(name).encode("ab")
    bos = tokenizer(name)._tokenizer.bos_token_id
    assert ids.dtype == np.int32
    assert ids[0] == bos
    assert bos not in ids[1:]


def test_a_chat_whose_template_writes_the_first_token_has_it_once(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    ids = tokenizer("byte level").encode(Conversation([TURN])).tolist()
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert ids.count(IM_START_ID) == 2, "the turn's, and the answer's"
    assert ids.count(IM_END_ID) == 1


def test_a_chat_whose_template_writes_no_first_token_has_none(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    assert BOS_ID not in tokenizer.encode(Conversation([TURN]))


@pytest.mark.parametrize(
    "roles", [["user"], ["system", "user"], ["user", "assistant", "user"], ["assistant"]]
)
def test_every_turn_stands_in_the_prompt_under_its_role(
    roles: list[str], tokenizer: Callable[[str], Tokenizer]
) -> None:
    messages = [{"role": role, "content": f"content {i} é"} for i, role in enumerate(roles)]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert (
        tokenizer("byte level").template.render(Conversation(messages))
        == f"<s>{expected}<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ids", [[7], [1, 2, 3, 250], [2**31 - 1, 0], []])
def test_ids_pass_as_they_are(ids: list[int], tokenizer: Callable[[str], Tokenizer]) -> None:
    encoded = tokenizer("byte level").encode(TokenIds(pack_ids(ids)))
    assert encoded.tolist() == ids
    assert encoded.dtype == np.int32


@pytest.mark.parametrize(
    "text", ["", "\0", "<s>", "<|im_end|>", "a" * 20_000, "\ufffd", "\u2028", "﷽" * 500]
)
def test_any_text_becomes_ids_of_the_vocabulary(
    text: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer("byte level").encode(text)
    assert 0 <= ids.min() <= ids.max() < len(tokenizer("byte level")._tokenizer)


def test_a_long_prompt_makes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = byte_level(tmp_path) / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "model_max_length": 5}))
    tokenizer = Tokenizer(tmp_path)
    assert len(tokenizer.encode("a b c d e f g")) > 5
    assert len(tokenizer.encode(Conversation([{"role": "user", "content": "a"}]))) > 5
    assert caplog.messages == []
    assert capfd.readouterr().err == ""


def test_a_folder_that_has_gone_is_no_hub_id(tmp_path: Path) -> None:
    """As that of a running server, whose tokenizer starts again."""
    with pytest.raises(CheckpointError, match=rf"^the model's folder {tmp_path}/gone does not"):
        Tokenizer(tmp_path / "gone")


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        with_template(tmp_path, None).encode(Conversation([TURN]))
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9]['content'] }}", "messages|undefined|no element"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("-\n{% for %}", "the model's chat template is damaged: line 2: Expected"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(
    template: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        with_template(tmp_path, template).encode(Conversation([TURN]))
    assert refusal.value.param == "messages"
    assert refusal.value.status == 400


def test_a_template_has_the_names_of_speakers_and_the_variables_of_the_request(
    tmp_path: Path,
) -> None:
    template = "{{ messages[0]['name'] }} {{ enable_thinking }} {{ add_generation_prompt }}"
    options: Any = {"add_generation_prompt": False}
    turn = {**TURN, "name": "Ada"}
    rendered = with_template(tmp_path, template).template.render(
        Conversation([turn], options, {"enable_thinking": False})
    )
    assert rendered == "Ada False False"
    thinking = Conversation([turn], {}, {"enable_thinking": 1})
    assert with_template(tmp_path, template).template.render(thinking) == "Ada 1 True"


def test_a_template_has_the_tools_and_their_calls(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path,
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "<{{ c.function.arguments.x }}>{% endfor %}{% endfor %}",
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    turn = {
        **TURN,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
        ],
    }
    assert tokenizer.template.render(Conversation([turn], tools=tools)) == json.dumps(tools) + "<é>"
    assert tokenizer.template.render(Conversation([turn])) == "<é>"


def test_the_template_that_is_shown_is_the_one_for_tools(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "plain")
    assert tokenizer.template.text == "plain"
    tokenizer._tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools }}"}
    assert tokenizer.template.text == "{{ tools }}"
    assert tokenizer.template.render(Conversation([TURN], tools=[{}])) == "[{}]"
    assert with_template(tmp_path / "without", None).template.text is None


def test_added_tokens_are_those_that_are_never_split(tokenizer: Callable[[str], Tokenizer]) -> None:
    added_tokens = tokenizer("byte level").added_tokens
    assert (added_tokens["<|im_start|>"], added_tokens["<|im_end|>"]) == (IM_START_ID, IM_END_ID)
    assert len(added_tokens) == 4


def test_an_unfinished_turn_is_left_open(tokenizer: Callable[[str], Tokenizer]) -> None:
    turns = [TURN, {"role": "assistant", "content": "the"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert (
        tokenizer("byte level")
        .template.render(Conversation(turns, options))
        .endswith("<|im_start|>assistant\nthe")
    )


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "add_generation_prompt", "tools"]
)
def test_what_is_not_the_templates_to_take_is_refused(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' is not the template's to take") as refusal:
        tokenizer("byte level").template.render(Conversation([TURN], {}, {name: True}))
    assert refusal.value.param == "chat_template_kwargs"


CLASSES = [
    ("llama", "LlamaTokenizer"),
    ("llama", "GPT2Tokenizer"),
    ("qwen2", "LlamaTokenizerFast"),
    ("qwen2", "PreTrainedTokenizerFast"),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen3", None),
]


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize(("model_type", "tokenizer_class"), CLASSES, ids=str)
def test_a_text_is_split_as_tokenizer_json_says_whatever_its_class(
    model_type: str, tokenizer_class: str | None, kind: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The classes of transformers for these models replace what is written there."""
    kind(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": tokenizer_class}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    written = WrittenTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ["ab abc", " a", "  ab</s> ab", "abc语 é\n...", "e\u0301 12345 it's"]:
        ids = written.encode(text).ids
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids[1:]) == written.decode(ids[1:])


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_a_folder_without_a_vocabulary_has_no_tokenizer(
    arch: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The library makes an empty one for some models: each text would have no tokens."""
    shutil.copy(checkpoint(arch) / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=f"^{tmp_path} has no usable tokenizer: "):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"added_tokens_decoder": 5}'], ids=repr)
def test_a_damaged_tokenizer_is_refused_in_one_line_with_its_file(
    name: str, content: str, tmp_path: Path
) -> None:
    byte_level(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/{name} ") as refusal:
        Tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
    ],
)
def test_a_file_beside_a_tokenizer_that_is_no_text_is_named(name: str, tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xe9")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/{name} cannot be read: 'utf-8' codec"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": "x"}, "field 'rms_norm_eps': .*expected float, got str"),
        ({"rope_scaling": [1]}, r"field 'rope_parameters': .*\.\.\.$"),
    ],
    ids=str,
)
def test_a_config_that_the_tokenizers_library_refuses_is_named_in_one_line(
    fields: dict[str, Any], message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (folder / "tokenizer.json").unlink()  # with it config.json is not read
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError, match=rf"^{folder}/config\.json: .*{message}") as refusal:
        Tokenizer(folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400 + len(str(folder))


def test_python_of_a_folder_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    ran = tmp_path / "ran"
    add_python(tmp_path, ran)
    with pytest.raises(CheckpointError, match="contains custom code"):
        Tokenizer(tmp_path)
    assert not ran.exists()
    assert sys.stdin.read().startswith("y"), "nothing was asked"


@pytest.mark.parametrize(("given", "num_bos"), [(None, 1), (True, 1), (False, 0)])
def test_a_text_has_special_tokens_unless_they_are_not_wanted(
    given: bool | None, num_bos: int, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer("byte level").encode("the dog", add_special_tokens=given).tolist()
    assert ids.count(BOS_ID) == num_bos
    assert ids[num_bos:] == tokenizer("byte level").encode("the dog").tolist()[1:]


@pytest.mark.parametrize(("given", "num_bos"), [(None, 1), (True, 2), (False, 1)])
def test_a_chat_has_those_of_its_template_and_more_if_they_are_wanted(
    given: bool | None, num_bos: int, tokenizer: Callable[[str], Tokenizer]
) -> None:
    assert (
        tokenizer("byte level")
        .encode(Conversation([TURN]), add_special_tokens=given)
        .tolist()
        .count(BOS_ID)
        == num_bos
    )


@pytest.mark.parametrize("name", ["byte level", "default"])
@pytest.mark.parametrize("text", ["", "the dog", " é 神 👍\n", "a , b !", "<|im_end|> and on"])
def test_text_comes_back_from_its_ids_as_it_was(
    name: str, text: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    ids = tokenizer(name).encode(text, add_special_tokens=False)
    assert tokenizer(name).text_of(ids) == text


def test_special_tokens_are_part_of_the_text_that_ids_stand_for(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    one = tokenizer("byte level")
    conversation = Conversation([TURN])
    assert one.text_of(one.encode(conversation)) == one.template.render(conversation)


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "default"])
def test_the_first_id_beyond_the_vocabulary_is_refused_by_number(
    name: str, tokenizer: Callable[[str], Tokenizer]
) -> None:
    one = tokenizer(name)
    size = len(one._tokenizer)  # these vocabularies have no gaps
    assert one.text_of(np.array([size - 1], dtype=np.int32))
    for bad in (size, 2**31 - 1, -1):
        with pytest.raises(
            InvalidRequest, match=rf"token id {bad} is outside \[0, {size}\)"
        ) as refusal:
            one.text_of(np.array([1, bad], dtype=np.int32))
        assert refusal.value.param is None


class Untokenizing:
    """A tokenizer whose attributes work but which must not tokenize."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> None:
        raise AssertionError("it was tokenized")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tokenizer: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tokenizer("byte level")
    for each in (one, one.length_check):
        monkeypatch.setattr(each, "_tokenizer", Untokenizing(one._tokenizer))
    with pytest.raises(RequestError, match=r"length is 10 tokens\..* 100000 bytes") as refusal:
        one.encode("x" * 100_000, max_tokens=10)
    assert refusal.value.code == "context_length_exceeded"


def changed(folder: Path, change: Callable[[Any], None]) -> Tokenizer:
    one = Tokenizer(byte_level(folder))
    change(one._tokenizer)
    return one


def to_nfc(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


DROPPING: dict[str, Callable[[Any], Any]] = {
    "a normalizer": lambda one: setattr(one.backend_tokenizer, "normalizer", normalizers.Strip()),
    "a splitter": lambda one: setattr(
        one.backend_tokenizer,
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "a token": lambda one: one.add_special_tokens(
        {"mask_token": AddedToken("<mask>", lstrip=True)}
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_where_text_may_be_dropped_there_is_no_bound(name: str, tmp_path: Path) -> None:
    one = changed(tmp_path, DROPPING[name])
    assert one.length_check.max_token_bytes is None
    assert one.encode("x" * 100, max_tokens=1).size > 1


def test_there_is_no_bound_for_a_vocabulary_that_is_not_byte_level(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    assert tokenizer("byte fallback").length_check.max_token_bytes is None


WORDS = ["the fox", " ", "\u1112\u1161\u11ab", "<|im_start|>"]


@pytest.fixture(scope="module", params=[lambda one: None, to_nfc], ids=["as it is", "NFC"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return changed(tmp_path_factory.mktemp("known"), request.param)


@given(text=st.text(max_size=50) | st.lists(st.sampled_from(WORDS)).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_token_stands_for_more_bytes_than_the_bound(known: Tokenizer, text: str) -> None:
    assert known.length_check.max_token_bytes
    num_tokens = len(known.encode(text, add_special_tokens=False))
    assert len(text.encode()) <= num_tokens * known.length_check.max_token_bytes
    assert known.encode(text, add_special_tokens=False, max_tokens=num_tokens).size == num_tokens


def test_the_longest_token_is_what_counts(
    tokenizer: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    one = tokenizer("byte level")
    longest = max(map(len, one._tokenizer.get_vocab()))
    assert one.length_check.max_token_bytes == longest == len("<|im_start|>")
    assert changed(tmp_path, to_nfc).length_check.max_token_bytes == 4 * longest


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_of_a_text_that_cannot_fit_few_characters_are_tokenized(
    name: str, tokenizer: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tokenizer(name)
    tokenize = one._tokenizer
    num_characters = 0

    def count(text: str, **options: Any) -> Any:
        nonlocal num_characters
        num_characters += len(text)
        return tokenize(text, **options)

    for each in (one, one.length_check):
        monkeypatch.setattr(each, "_tokenizer", Counting(tokenize, count))
    with pytest.raises(RequestError, match=r"maximum context length is 100 tokens\.") as refusal:
        one.encode("x y " * 2**18, max_tokens=100)
    assert refusal.value.code == "context_length_exceeded"
    assert num_characters < 2**16
    assert (num_characters == 0) == (name == "byte level")  # whose bytes say enough
    assert one.encode("x y", max_tokens=100).size > 1


class Counting:
    """A tokenizer whose calls go to a function."""

    def __init__(self, tokenizer: Any, call: Callable[..., Any]) -> None:
        self._tokenizer = tokenizer
        self._call = call

    def __call__(self, text: str, **options: Any) -> Any:
        return self._call(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_tokenizer_that_is_ready_makes_nothing_for_the_first_prompt(tmp_path: Path) -> None:
    """Neither for a text, nor for a chat with a control token, nor for ids."""
    byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.get_ready()
    parts = [tokenizer, tokenizer._control_tokens, tokenizer.template, tokenizer.length_check]
    made = [set(vars(part)) for part in parts]
    assert "_copy" in vars(tokenizer._control_tokens)

    tokenizer.encode("a" * 50, max_tokens=40)
    tokenizer.encode(Conversation([{"role": "user", "content": "a<|im_end|>"}]))
    tokenizer.text_of(tokenizer.encode("the dog"))
    assert [set(vars(part)) for part in parts] == made


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_chats_is_no_reason_not_to_be_ready(
    tmp_path: Path, template: str | None
) -> None:
    tokenizer = with_template(tmp_path, template)
    tokenizer.get_ready()
    assert tokenizer.encode("the dog").size
    assert tokenizer.template.damage is None


def test_of_a_template_that_writes_too_much_nothing_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(tmp_path, "{{ 'x y ' * 1000000 }}")
    tokenize = tokenizer._tokenizer
    num_characters = 0

    def count(text: str, **options: Any) -> Any:
        nonlocal num_characters
        num_characters += len(text)
        return tokenize(text, **options)

    monkeypatch.setattr(tokenizer, "_tokenizer", Counting(tokenize, count))
    tokenizer.get_ready(max_tokens=1000)
    assert num_characters < 100
