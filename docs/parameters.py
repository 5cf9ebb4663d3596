"""Generates the parameters table of docs/api.md: how every field of a generating endpoint is treated."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from weft.server.apis.anthropic.body import REFUSED_IN_MESSAGES
from weft.server.apis.anthropic.schema import CountTokensBody, MessagesBody
from weft.server.apis.decisions.questions import REFUSED_IN_SGLANG_DECISIONS, REFUSED_IN_SYSTEMONE
from weft.server.apis.decisions.schema import DecisionBody, SglangBody, SystemOneBody
from weft.server.apis.openai.chat import REFUSED_IN_CHAT
from weft.server.apis.openai.completions import REFUSED_IN_COMPLETIONS
from weft.server.apis.responses.options import ACCEPTED as ACCEPTED_IN_RESPONSES
from weft.server.apis.responses.options import REFUSED as REFUSED_IN_RESPONSES
from weft.server.apis.responses.options import REFUSED_IN_COMPACT
from weft.server.apis.responses.schema import CompactBody, ConversationBody, ConversationUpdate, ItemsBody, ResponseBody
from weft.server.apis.speech.body import REFUSED as REFUSED_OF_SPEECH
from weft.server.apis.speech.body import SpeechBody
from weft.server.task.bodies import ChatCompletionBody, CompletionBody
from weft.server.task.validation import ACCEPTED, REFUSED_EVERYWHERE
from weft.server.task.vectors import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody

Routes = Sequence[tuple[str, type[BaseModel], Mapping[str, tuple[object, ...]]]]

ROUTES: Routes = (
    ("/v1/chat/completions", ChatCompletionBody, REFUSED_IN_CHAT),
    ("/v1/completions", CompletionBody, REFUSED_IN_COMPLETIONS),
    ("/v1/responses", ResponseBody, REFUSED_IN_RESPONSES),
)

_ACCEPTED: Mapping[type[BaseModel], frozenset[str]] = {
    ResponseBody: ACCEPTED_IN_RESPONSES,
    CompactBody: ACCEPTED_IN_RESPONSES,
    ConversationBody: frozenset(),
    ConversationUpdate: frozenset(),
}

REMARKS = {
    "input": "text, or messages, calls and their outputs; reasoning in [responses](#responses); [pictures](#pictures)",
    "instructions": "a system message before the input",
    "max_output_tokens": "counts reasoning too; at most what there is room for",
    "generate": "false computes the prompt and generates nothing; the input may then be empty",
    "max_tool_calls": "bounds calls of hosted tools, of which there are none",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; the others belong to hosted tools",
    "conversation": "the items of a [conversation](#conversations) before this input; not with `previous_response_id`",
    "previous_response_id": "the whole conversation before this input, without its instructions",
    "background": "needs `store`; answers at once, the events are kept",
    "text": "`format`: `json_schema` or `json_object`, enforced by grammar; `verbosity` as in chat",
    "reasoning": "`effort`; in chat `enabled`, in /v1/responses `context` too; the others are reported",
    "truncation": "`auto` leaves out the oldest turns",
    "seed": "one for all prompts of a list; without it each prompt has its own",
    "messages": "text, text parts and [pictures](#pictures); audio or a file is refused",
    "prompt": "text, token ids, or a list of either; null is the beginning-of-text token alone",
    "suffix": "for vocabularies with tokens for filling in the middle",
    "n": "at most `max_n`",
    "best_of": "not with `stream`",
    "max_tokens": "at most what there is room for; 0 with `echo` scores the prompt; 16 if not given to /v1/completions",
    "max_completion_tokens": "the same, and beats `max_tokens`",
    "temperature": "0 is greedy",
    "stop": "a text or up to 64",
    "stream_options": "`include_usage`, `include_obfuscation`, `continuous_usage_stats`",
    "logprobs": "a number up to 20 in /v1/completions",
    "top_logprobs": "0 to 20",
    "prompt_logprobs": "0 to 20; not with `stream`",
    "logprob_token_ids": "reported at every position, after the most probable ones",
    "truncate_prompt_tokens": "keeps the last N tokens; -1 as many as fit",
    "no_repeat_ngram_size": "so many tokens in a row never occur twice; 0 to 1,024",
    "source_language": "code of a language, for [models with an encoder](models.md#models-with-an-encoder)",
    "target_language": "as `source_language`, of the answer",
    "use_beam_search": "`n` beams, up to 32; not with `stream`, `stop`, or what samples",
    "length_penalty": "with `use_beam_search`",
    "early_stopping": "with `use_beam_search`: true, false, `never`",
    "service_tier": "`flex` last; `priority` and `fast` first, only for `priority_keys`; the answer names the tier",
    "priority": "lower is served earlier within a tier; negative only for `priority_keys`",
    "prompt_cache_options": "`explicit` without a breakpoint leaves the prefix cache alone; ttl `30m`, `12h`",
    "prompt_cache_key": "a hint; every request finds what is cached, whatever its key",
    "cache_salt": "only requests with the same salt share blocks",
    "prewarm": "computes the prompt and generates nothing",
    "kv_transfer_params": "`do_remote_decode`: the prompt's blocks are in the shared folder before the answer, which "
    "has the params for the other server; `do_remote_prefill`: they are loaded; `remote_...` only null",
    "continue_final_message": "leaves the last message open; not with `add_generation_prompt: true`",
    "response_format": "`json_object`, `json_schema`, and as an extension `structural_tag`; enforced by grammar",
    "structured_outputs": "one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`",
    "guided_json": "as `structured_outputs.json`",
    "guided_regex": "as `structured_outputs.regex`",
    "guided_choice": "as `structured_outputs.choice`",
    "guided_grammar": "as `structured_outputs.grammar`: Lark, as llguidance reads it",
    "tools": "functions and custom tools; the input of a custom tool may follow a regex or a regular Lark grammar",
    "tool_choice": "`required`, a named tool and `allowed_tools` are enforced by a grammar",
    "parallel_tool_calls": "false: the grammar permits one call",
    "functions": "the old name of `tools`, answered in `function_call`",
    "function_call": "the old name of `tool_choice`",
    "reasoning_effort": "sets the template's variable, else its thinking switch and a budget; else reported",
    "thinking_token_budget": "ends reasoning after so many tokens; reported if the model has no reasoning",
    "reasoning_budget_tokens": "as `thinking_token_budget`",
    "include_reasoning": "false leaves `reasoning_content` and `reasoning` out of the answer",
    "chat_template_kwargs": "variables of the chat template; they beat those that other fields set",
    "prediction": "verified several tokens at a time; the answer is faster, never different",
    "documents": "if the chat template names them, else refused",
    "verbosity": "honoured if the chat template names it",
    "user": "no effect yet: all callers share one queue",
    "safety_identifier": "no effect yet: all callers share one queue",
    "metadata": "up to 16 pairs; keys up to 64 characters, values up to 512",
}
"""Remarks on fields. They hold on every route that has the field."""


MESSAGES_ROUTES: Routes = (
    ("/v1/messages", MessagesBody, REFUSED_IN_MESSAGES),
    ("/v1/messages/count_tokens", CountTokensBody, REFUSED_IN_MESSAGES),
)
MESSAGES_REMARKS = {
    "messages": "blocks text, thinking, tool_use, tool_result, [image](#pictures); unknown ones as text; no documents",
    "system": "a text or text blocks",
    "max_tokens": "required; beyond the context the answer ends with `model_context_window_exceeded`",
    "temperature": "0 to 1",
    "tools": "tools that the caller runs; others are left out and reported",
    "tool_choice": "`any` and `tool` are enforced by a grammar, as is `disable_parallel_tool_use`",
    "thinking": "as far as the model can switch it; without it the model's own habit; `budget_tokens` ends it",
    "output_config": "`effort` as `reasoning_effort`; `format` is enforced by a grammar",
    "output_format": "the older name of `output_config.format`",
    "cache_control": "as on blocks and tools: the prompt up to there is kept for `5m` or `1h`",
    "service_tier": "`standard_only` is the tier `default`",
    "metadata": "no effect yet: all callers share one queue",
    "thread": "the SDK then sends the whole conversation",
}


CONVERSATION_ROUTES: Routes = (
    ("/v1/responses/compact", CompactBody, REFUSED_IN_COMPACT),
    ("/v1/conversations", ConversationBody, {}),
    ("/v1/conversations/{id}", ConversationUpdate, {}),
    ("/v1/conversations/{id}/items", ItemsBody, {}),
)
CONVERSATION_REMARKS = {
    **{name: REMARKS[name] for name in ("input", "instructions", "previous_response_id", "prompt_cache_key")},
    **{name: REMARKS[name] for name in ("metadata", "service_tier", "prompt_cache_options")},
    "items": "up to 20 items of an input; references are refused",
}


DECISION_ROUTES: Routes = (
    ("/v1/decisions", DecisionBody, REFUSED_EVERYWHERE),
    ("/v1/decisions (SGLang)", SglangBody, REFUSED_IN_SGLANG_DECISIONS),
    ("/v1/systemone", SystemOneBody, REFUSED_IN_SYSTEMONE),
)
DECISION_REMARKS = {
    "input": "text, or messages, calls and their outputs; an image is refused. SGLang: any JSON",
    "questions": "1 to 400; 2 to 255 choices and levels. SGLang: 2 to 26, 2 to 10. System One: 1 to 255, 1 to 10",
    "temperature": "above 0; of the probabilities",
    "prompt_format_version": "1",
    "chat_template_kwargs": "must not switch thinking on",
    "service_tier": "`flex` last; `priority` and `fast` first, only for `priority_keys`",
    "prompt_cache_options": "`explicit` without a breakpoint: only these questions share blocks; ttl `30m`, `12h`",
    **{name: REMARKS[name] for name in ("priority", "prompt_cache_key", "cache_salt", "safety_identifier")},
}


VECTOR_ROUTES: Routes = (
    ("/v1/embeddings", EmbeddingBody, REFUSED_EVERYWHERE),
    ("/pooling", PoolingBody, REFUSED_EVERYWHERE),
    ("/v1/classify", ClassifyBody, REFUSED_EVERYWHERE),
    ("/v1/score", ScoreBody, REFUSED_EVERYWHERE),
    ("/v1/rerank", RerankBody, REFUSED_EVERYWHERE),
)
VECTOR_REMARKS = {
    "input": "a text, token ids, or up to 8,192 of either",
    "dimensions": "if config.json has `matryoshka_dimensions` or `is_matryoshka`; cut before the length becomes 1",
    "encoding_format": "`float`, or `base64` of float32 in little-endian order",
    "normalize": "to length 1; the default is what the checkpoint says",
    "use_activation": "false answers with logits",
    "prompt_name": "a prompt of the checkpoint, put before each text",
    "input_type": "as `prompt_name`; `search_query` is `query`, `search_document` is `document`",
    "task": "`token_embed`, the default, for the hidden states of all tokens; or the task of the model",
    "truncate_prompt_tokens": "keeps the first N tokens and the special ones at the end; -1 as many as fit",
    "max_tokens_per_doc": "cuts the documents, never the query",
    "text_1": "one text, or as many as in `text_2`",
    "documents": "texts, or objects with `text`; up to 8,192",
    "top_n": "so many documents, the most relevant first",
    "return_documents": "false if not given",
    "instruction": "for a reranker with a chat template",
    "cache_salt": "only requests with the same salt share blocks",
    "user": "no effect yet: all callers share one queue",
}


SPEECH_ROUTES: Routes = (
    ("/v1/audio/transcriptions", SpeechBody, REFUSED_OF_SPEECH),
    ("/v1/audio/translations", SpeechBody, REFUSED_OF_SPEECH),
)
SPEECH_REMARKS = {
    "language": "of the sound, by code or English name; else the checkpoint's, else detected; Whisper only",
    "prompt": "text that stands before the sound's, cut to its end; Whisper only",
    "temperature": "0 to 1; Whisper raises 0, the default, where a text repeats itself or is improbable",
    "response_format": "`json`, `text`, `srt`, `vtt`, `verbose_json`",
    "timestamp_granularities": "`segment` and `word`, with `verbose_json`; `word` needs `alignment_heads`",
    "include": "`logprobs`, with `json`",
    "stream": "with `json` and `text`",
    "chunking_strategy": "but for `auto`, which is what Weft does",
}


def treatments(body: type[BaseModel], refused: Mapping[str, object]) -> dict[str, str]:
    """How each field of a body is treated: honoured, accepted (no effect, reported) or refused."""
    known = {name: "accepted" if name in _ACCEPTED.get(body, ACCEPTED) else "honoured" for name in body.model_fields}
    return {**known, **{name: "refused" for name in refused if "." not in name}}


def render_table(routes: Routes = ROUTES, remarks: Mapping[str, str] = REMARKS) -> str:
    """The table in Markdown: one row per field, honoured fields first."""
    by_route = [treatments(body, refused) for _, body, refused in routes]
    names = list(dict.fromkeys(name for route in by_route for name in route))
    rows = [(name, [route.get(name, "") for route in by_route]) for name in names]
    order = ("honoured", "accepted", "refused", "")
    rows.sort(key=lambda row: ([order.index(cell) for cell in row[1]], row[0]))
    head = "| field | " + " | ".join(f"`{path}`" for path, _, _ in routes) + " | remark |"
    lines = [head, "|---" * (len(routes) + 2) + "|"]
    lines += [f"| `{name}` | {' | '.join(cells)} | {remarks.get(name, '')} |" for name, cells in rows]
    return "\n".join(lines) + "\n"
