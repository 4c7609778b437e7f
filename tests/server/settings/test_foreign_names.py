"""Bodies of other servers: a suggestion is right, or there is none."""

import pytest

from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.api.strict_body import Body
from ropewalk.server.turns.chat_schema import ChatRequest
from ropewalk.server.turns.message_schema import MessagesRequest
from ropewalk.server.turns.response_schema import ResponsesRequest
from ropewalk.server.wording import did_you_mean


def names(text: str) -> list[str]:
    return text.split()


# Names of the fields of chats and completions in November 2026, from the files that
# `server/settings/foreign_fields.py` names, and from OpenAI's and Anthropic's references.
VLLM = names("""
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens
    max_completion_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p tools tool_choice reasoning_effort thinking_token_budget include_reasoning
    parallel_tool_calls user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection stream_interval prompt suffix prompt_embeds best_of
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern structural_tag logits_processors early_stopping
""")
LLAMA_CPP = names("""
    verbose timings_per_token stream cache_prompt return_tokens return_progress
    sse_ping_interval n_predict n_indent n_keep n_discard n_cmpl n_cache_reuse t_max_predict_ms
    t_max_prompt_ms response_fields top_n_sigma xtc_probability xtc_threshold typical_p typ_p
    dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau
    mirostat_eta adaptive_target adaptive_decay n_probs min_keep backend_sampling
    post_sampling_probs lora json_schema grammar grammar_lazy grammar_type grammar_triggers
    preserved_tokens chat_format reasoning_format reasoning_in_content thinking_forced_open
    parse_tool_calls samplers id_slot image_data prompt input_prefix input_suffix input_extra
    penalize_nl tfs_z penalty_prompt stop nprobs slot_id system_prompt top_a
""")
SGLANG = names("""
    best_of return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids return_prompt_token_ids return_meta_info task
    regex ebnf stop_regex no_stop_trim lora_path session_id session_params separate_reasoning
    stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video images_config
    custom_logit_processor custom_params input_ids rid extra_key ngram_corpus_id bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
    custom_labels text input_embeds image_data sampling_params return_logprob logprob_start_len
    top_logprobs_num token_ids_logprob return_text_in_logprobs max_new_tokens min_new_tokens
    stop_token_ids n sampling_seed json_schema
""")
OPENAI = names("""
    audio function_call functions metadata modalities prediction prompt_cache_key
    prompt_cache_retention reasoning safety_identifier service_tier store verbosity
    web_search_options background conversation include input instructions max_output_tokens
    max_tool_calls previous_response_id text top_logprobs truncation image moderation
""")
OTHERS = names("""
    system stop_sequences thinking container mcp_servers cache_control context_management
    output_config betas max_tokens_to_sample inference_geo inputs parameters do_sample
    max_length temp num_predict options keep_alive format raw template provider transforms route
    plugins models top_n_tokens details watermark decoder_input_details return_full_text typical
    epsilon_cutoff eta_cutoff guidance_scale num_beams penalty_alpha enable_thinking extra_body
    timeout safe_prompt random_seed prompt_mode min_length num_ctx repeat_penalty top_a
""")
FIELDS = dict.fromkeys([*VLLM, *LLAMA_CPP, *SGLANG, *OPENAI, *OTHERS])

CHAT, COMPLETION, RESPONSES, MESSAGES = bodies = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
)


def told(body: type[Body], name: str) -> str:
    """What a body says about a field that it has not."""
    (problem,) = (text for field, text in body._problems_of_names({name: 1}) if field == name)
    return problem


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        (COMPLETION, "n_predict", "`max_tokens`"),
        (CHAT, "n_predict", "`max_tokens`"),
        (RESPONSES, "n_predict", "`max_output_tokens`"),
        (COMPLETION, "max_new_tokens", "`max_tokens`"),
        (COMPLETION, "max_completion_tokens", "`max_tokens`"),
        (RESPONSES, "max_tokens", "`max_output_tokens`"),
        (MESSAGES, "max_completion_tokens", "`max_tokens`"),
        (CHAT, "repeat_penalty", "`repetition_penalty`"),
        (COMPLETION, "n_probs", "`logprobs`"),
        (CHAT, "n_probs", "`top_logprobs`"),
        (MESSAGES, "stop", "`stop_sequences`"),
        (CHAT, "stop_sequences", "`stop`"),
        (CHAT, "regex", "`guided_regex`"),
        (COMPLETION, "grammar", "`guided_regex`, or `response_format` with a JSON schema"),
        (CHAT, "json_schema", "`response_format`"),
        (RESPONSES, "response_format", "`text`"),
        (RESPONSES, "messages", "`input`"),
        (CHAT, "system", "`messages` with a message of the role system"),
        (CHAT, "enable_thinking", "`chat_template_kwargs` with this variable"),
        (CHAT, "thinking", "`reasoning_effort`"),
        (RESPONSES, "reasoning_effort", "`reasoning`"),
        (CHAT, "rope_scaling", "`rope`"),
        (CHAT, "positions", "`rope` with this field"),
        (COMPLETION, "messages", "`prompt` (`messages` is a field of /v1/chat/completions)"),
    ],
)
def test_a_field_of_the_same_meaning_is_named(body: type[Body], name: str, words: str) -> None:
    """Each body has its own field of that meaning."""
    assert told(body, name) == f"is not supported, use {words}"


@pytest.mark.parametrize("body", bodies)
def test_no_field_of_another_server_is_taken_for_a_misspelling(body: type[Body]) -> None:
    """`allowed_token_ids` was answered with `stop_token_ids`, which does the opposite."""
    for name in FIELDS:
        if name not in body.known:
            assert "Did you mean" not in told(body, name), name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens")),
        *(("top-p", "top_p"), ("steam", "stream"), ("mesages", "messages"), ("toosl", "tools")),
        *(("max_completoin_tokens", "max_completion_tokens"), ("tool_chioce", "tool_choice")),
        *(("foo", None), ("x", None), ("token_ids", None), ("format", None), ("choice", None)),
    ],
)
def test_a_misspelt_field_is_told_the_right_one(name: str, meant: str | None) -> None:
    """Few letters differ, or two neighbours are swapped."""
    hint = "" if meant is None else f". Did you mean `{meant}`?"
    assert told(CHAT, name) == f"is not a field of this body, remove it{hint}"


def test_two_names_that_are_equally_near_are_no_suggestion() -> None:
    """Either one could be wrong."""
    assert did_you_mean("top_z", ["top_k", "top_p"]) == ""
    assert did_you_mean("top_z", ["top_p"]) == " Did you mean `top_p`?"
