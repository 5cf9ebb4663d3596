"""How byte-level tokenizers of GGUF files divide a text before merges: patterns by the name in `tokenizer.ggml.pre`.

A file without a name has llama.cpp's default. Facts: github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`.
"""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST_OF_CASES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"|\p{N}" + _REST
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = _CASES % ("", "") + r"|\p{N}" + _REST_OF_CASES
_GPT4O = _CASES % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _REST_OF_CASES

_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Of the alphabets that DeepSeek's first tokenizer knew."""

SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), (QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "midm-2.0": (_LLAMA3,),
    "qwen35": (QWEN35,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    "seed-coder": (_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "viking": (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
    "minicpm5": (r"\p{N}{1,3}", _WORDS + r"|\p{N}+" + _REST),
}
"""Patterns, each of which divides what those before it left; a match is a piece, and so is what lies between two."""
GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe", "a.x-4.0", "mellum", "trillion")
GPT2_WITH_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "midm-2.0", "minicpm5", "tekken", "llama4")
"""Where a piece of text that is a token as it is need not be reached by merges."""
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0", "tekken")
"""Where a prompt has a token at its beginning unless the file says otherwise, as with SentencePiece's vocabularies."""
