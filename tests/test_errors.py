"""The words of errors that clients look for."""

from __future__ import annotations

from minisgl.errors import PromptTooLong


def test_an_overflow_of_the_context_has_the_words_that_clients_know() -> None:
    error = PromptTooLong.of_tokens(60, 5, 64)
    assert error.code == "context_length_exceeded"
    assert str(error) == (
        "This model's maximum context length is 64 tokens. However, you requested 65 tokens "
        "(60 in the messages, 5 in the completion). "
        "Please reduce the length of the messages or completion."
    )
