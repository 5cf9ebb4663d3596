"""Vocabularies of GGUF files that are no BPE, as parts of a tokenizer.json: SentencePiece's unigram, and WordPiece.

Facts: github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp` (its kinds UGM and WPM) and `convert_hf_to_gguf.py`.
"""

import base64

from weft.engine.gguf.file import GgufError, GgufModel

Json = dict[str, object]

_NORMAL, _UNUSED, _BYTE = 1, 5, 6


def describe_unigram(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    """SentencePiece's unigram model, with its rules for characters and white space.

    Raises:
        GgufError: Scores or the unknown token are missing.
    """
    scores = model.values("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise GgufError(f"{len(scores)} scores in tokenizer.ggml.scores for {len(types)} tokens")
    unknown = model.optional("tokenizer.ggml.unknown_token_id", int)
    if unknown is None:
        unknown = 2
    if not 0 <= unknown < len(types):
        raise GgufError(f"tokenizer.ggml.unknown_token_id is {unknown}, and there are {len(types)} tokens")
    worst = min((score for score, kind in zip(scores, types, strict=True) if kind == _NORMAL), default=0.0)
    of_kind = {_UNUSED: 16 * worst}
    vocab = [
        [token, scores[index] if types[index] == _NORMAL else of_kind.get(types[index], worst)]
        for token, index in ids.items()
    ]
    squeezes = model.optional("tokenizer.ggml.remove_extra_whitespaces", bool) is True
    has_prefix = model.optional("tokenizer.ggml.add_space_prefix", bool) is True
    by_bytes = _BYTE in types
    fallback: list[Json] = [{"type": "ByteFallback"}] * by_bytes
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        *fallback,
        {"type": "Fuse"},
        *[{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * has_prefix,
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, squeezes, has_prefix)},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": by_bytes},
    }


def _normalizers(model: GgufModel, squeezes: bool, has_prefix: bool) -> list[Json]:
    given = bytes(value & 255 for value in model.values("tokenizer.ggml.precompiled_charsmap", int))
    charsmap: Json = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(given).decode()}
    steps = [charsmap] * bool(given)
    if squeezes:
        steps += [_replace(" {2,}", " "), _replace(r"\A ", ""), _replace(r"[ ▁]+\z", "")]
    if has_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def _replace(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def describe_wordpiece(model: GgufModel, ids: dict[str, int], types: list[int]) -> Json:
    """BERT's WordPiece: in the file "▁" begins a word, and what goes on has no "##".

    Raises:
        GgufError: A token that stands around texts is missing.
    """
    vocab = {_as_in_bert(token): index for token, index in ids.items()}
    names = {index: token for token, index in vocab.items()}
    ends = []
    for key, usual in (("cls", 101), ("seperator", 102), ("unknown", 100)):  # the format's own spelling
        given = model.optional(f"tokenizer.ggml.{key}_token_id", int)
        if (name := names.get(usual if given is None else given)) is None:
            raise GgufError(f"tokenizer.ggml.{key}_token_id is {given}, and there are {len(types)} tokens")
        ends.append(name)
    first, last, unknown = ends
    lowers = model.optional("tokenizer.ggml.normalizer.lowercase", bool) is not False
    strips = model.optional("tokenizer.ggml.normalizer.strip_accents", bool)
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lowers}
    model_part = {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##"}
    return {
        "normalizer": normalizer | {"strip_accents": lowers if strips is None else strips},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(first, last, vocab),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": model_part | {"max_input_chars_per_word": 100, "vocab": vocab},
    }


def _as_in_bert(token: str) -> str:
    if token.startswith("▁"):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"##{token}"


def _around(first: str, last: str, vocab: dict[str, int]) -> Json:
    def text(name: str, kind: int) -> Json:
        return {"Sequence": {"id": name, "type_id": kind}}

    def token(name: str, kind: int) -> Json:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    single = [token(first, 0), text("A", 0), token(last, 0)]
    named = {name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in (first, last)}
    pair = [*single, text("B", 1), token(last, 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}
