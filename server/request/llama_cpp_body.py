"""Converts llama.cpp's bodies to completion bodies."""

from collections.abc import Mapping
from typing import Any

from weft.server.errors import GrammarError
from weft.server.schemas.common import PromptCacheOptions
from weft.server.schemas.completions import CompletionBody
from weft.server.schemas.llama_cpp import InfillBody, LlamaCppBody, LlamaCppCompletionBody
from weft.server.schemas.structured_output import StructuredOutputs

RENAMED: Mapping[str, str] = {
    r"^max_tokens": "n_predict",
    r"^repetition_penalty": "repeat_penalty",
    r"^logprobs": "n_probs",
    r"^guided_json": "json_schema",
    r"^structured_outputs\.grammar": "grammar",
    r"^suffix": "input_suffix",
}
"""Beginnings of paths in the completion body, and what the caller calls them."""

REFUSED_IN_LLAMA_CPP: Mapping[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "typical_p": (None, 1),
    "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "adaptive_target": (None, -1),
    "n_indent": (None, 0),
    "post_sampling_probs": (None, False),
    "lora": (None, []),
    "image_data": (None, []),
    "n_cmpl": (None, 1),
    "grammar_lazy": (None, False),
}
_NEVER = -100.0


def completion_of(body: LlamaCppCompletionBody | InfillBody) -> CompletionBody:
    """The prompt to continue, or the gap to fill.

    Raises:
        GrammarError: The grammar has no rule in the form of GBNF.
    """
    if isinstance(body, InfillBody):
        extra = "".join(f"--- {each.filename or 'snippet'} ---\n{each.text}\n" for each in body.input_extra or ())
        prompt: dict[str, Any] = {
            "prompt": extra + body.input_prefix + (body.prompt or ""),
            "suffix": body.input_suffix,
        }
    else:
        prompt = {"prompt": body.prompt}
    if body.grammar and "::=" not in body.grammar:
        raise GrammarError("grammar must be GBNF: a rule is written name ::= ..., got none", param="grammar")
    return CompletionBody(
        **prompt,
        model=body.model,
        stream=body.stream,
        max_tokens=None if body.n_predict in (None, -1, -2) else body.n_predict,
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop or None,
        repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body),
        ignore_eos=body.ignore_eos,
        logprobs=body.n_probs or None,
        return_token_ids=body.return_tokens,
        prompt_cache_options=PromptCacheOptions(mode="explicit") if body.cache_prompt is False else None,
        structured_outputs=StructuredOutputs(grammar=body.grammar) if body.grammar else None,
        guided_json=body.json_schema,
    )


def _logit_bias(body: LlamaCppBody) -> dict[str, float] | None:
    if body.logit_bias is None:
        return None
    pairs = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    return {f"{token_id}".removesuffix(".0"): _NEVER if bias is False else bias for token_id, bias in pairs}
