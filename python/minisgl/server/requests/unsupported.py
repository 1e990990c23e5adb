"""Fields of other servers that would change an answer and are not supported: refused by name.

Each accepts null and the values that change nothing. Fields that would not change an answer are not
here: unknown fields are ignored. The servers: vLLM, SGLang, llama.cpp, Ollama, TGI, OpenRouter,
Mistral, Anthropic, Alibaba.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from minisgl.server.requests.validation import NeutralOnly, RequestModel

Refused: TypeAlias = Annotated[Any, NeutralOnly()]
FalseOnly: TypeAlias = Annotated[Any, NeutralOnly(False)]
TrueOnly: TypeAlias = Annotated[Any, NeutralOnly(True)]
ZeroOnly: TypeAlias = Annotated[Any, NeutralOnly(0)]
OneOnly: TypeAlias = Annotated[Any, NeutralOnly(1)]
EmptyListOnly: TypeAlias = Annotated[Any, NeutralOnly([])]
EmptyObjectOnly: TypeAlias = Annotated[Any, NeutralOnly({})]


class UnsupportedFields(RequestModel):
    """Fields that are refused in every request that generates text."""

    # How tokens are chosen.
    allowed_token_ids: Refused = None
    bad_words: EmptyListOnly = None
    custom_logit_processor: Refused = None
    custom_params: EmptyObjectOnly = None
    do_sample: TrueOnly = None
    dry_multiplier: ZeroOnly = None
    dynatemp_range: ZeroOnly = None
    length_penalty: OneOnly = None
    logits_processors: EmptyListOnly = None
    mirostat: ZeroOnly = None
    random_seed: Annotated[Any, NeutralOnly(instead="seed")] = None
    repeat_penalty: Annotated[Any, NeutralOnly(1, instead="repetition_penalty")] = None
    samplers: Refused = None
    tfs_z: OneOnly = None
    thinking_token_budget: Refused = None
    top_a: ZeroOnly = None
    typical_p: OneOnly = None
    use_beam_search: FalseOnly = None
    vllm_xargs: EmptyObjectOnly = None
    xtc_probability: ZeroOnly = None

    # Where the answer ends, and its format.
    format: Annotated[Any, NeutralOnly(instead="response_format")] = None
    gbnf: Annotated[Any, NeutralOnly(instead="ebnf")] = Field(None, alias="grammar")
    guided_whitespace_pattern: Refused = None
    max_new_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    min_new_tokens: Annotated[Any, NeutralOnly(0, instead="min_tokens")] = None
    n_predict: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    no_stop_trim: Annotated[Any, NeutralOnly(False, instead="include_stop_str_in_output")] = None
    num_predict: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    stop_regex: EmptyListOnly = None
    stop_sequences: Annotated[Any, NeutralOnly([], instead="stop")] = None
    structural_tag: Refused = None

    # The model and the prompt.
    audio_data: Refused = None
    image_data: Refused = None
    input_embeds: Refused = None
    input_ids: Refused = None
    kv_transfer_params: Refused = None
    lora_path: Refused = None
    prompt_embeds: Refused = None
    session_params: EmptyObjectOnly = None
    suffix: Annotated[Any, NeutralOnly("")] = None
    truncate_prompt_tokens: Refused = None
    video_data: Refused = None

    # Further parts of the answer, besides its text.
    echo: FalseOnly = None
    return_hidden_states: FalseOnly = None
    return_token_ids: FalseOnly = None
    return_tokens_as_token_ids: FalseOnly = None
    spaces_between_special_tokens: TrueOnly = None

    # Objects whose fields belong at the top level.
    extra_body: EmptyObjectOnly = None
    options: EmptyObjectOnly = None
    sampling_params: EmptyObjectOnly = None


class UnsupportedConversationFields(RequestModel):
    """Fields that are refused in conversations, of whichever API."""

    add_special_tokens: FalseOnly = None
    audio: Refused = None
    chat_template: Refused = None
    documents: EmptyListOnly = None
    enable_search: FalseOnly = None
    enable_thinking: Annotated[Any, NeutralOnly(instead="chat_template_kwargs")] = None
    function_call: Annotated[Any, NeutralOnly("none", "auto", instead="tool_choice")] = None
    functions: Annotated[Any, NeutralOnly([], instead="tools")] = None
    include_reasoning: TrueOnly = None
    modalities: Annotated[Any, NeutralOnly(["text"])] = None
    moderation: Refused = None
    plugins: EmptyListOnly = None
    prompt_logprobs: Refused = None
    safe_prompt: FalseOnly = None
    separate_reasoning: TrueOnly = None
    stream_reasoning: TrueOnly = None
    system: Annotated[Any, NeutralOnly(instead="a system message")] = None
    thinking: Annotated[Any, NeutralOnly(instead="chat_template_kwargs")] = None
    thinking_budget: Refused = None
    verbosity: Annotated[Any, NeutralOnly("medium")] = None
    web_search_options: Refused = None
