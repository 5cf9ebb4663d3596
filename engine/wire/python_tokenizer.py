"""Converts a tokenizer that transformers has in Python alone: a SentencePiece model whose pieces have ids of their own.

Marian has one model for its inputs and one for its answers, and a vocabulary for both; M2M100, PLBart and Speech2Text
number the pieces of one model anew. The model cuts texts as `sentencepiece_model` has it; transformers' tokenizer
tells the ids, and what stands around a prompt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from weft.engine.wire.sentencepiece_model import ODD_LINES, InexactError, convert_sentencepiece

_OF_ANSWERS = "\ufdd0"
"""Begins a piece that answers alone have, so that no text is cut into it. Of a text it is replaced."""

_MOST_LACKING = 0.1
"""Of the pieces of a model may have no id: Marian's vocabularies lack those that no text of their training has."""


def convert_python_tokenizer(loaded: Any) -> tokenizers.Tokenizer:
    """The same ids, from the files of a tokenizer that transformers has loaded.

    Raises:
        ImportError: A package is missing; the message says how to install it.
        InexactError: It has no SentencePiece model, or one line has other ids.
    """
    if getattr(loaded, "separate_vocabs", False):
        raise InexactError("a vocabulary for inputs and another one for answers are not supported")
    if getattr(loaded, "do_upper_case", False) or getattr(loaded, "do_lower_case", False):
        raise InexactError("do_upper_case and do_lower_case are not supported")
    named = [*getattr(loaded, "spm_files", ()), *(getattr(loaded, name, "") for name in ("spm_file", "vocab_file"))]
    file = next((Path(each) for each in named if str(each).endswith((".spm", ".model"))), None)
    if file is None:
        raise InexactError(f"{type(loaded).__name__} is not supported; the model needs a tokenizer.json")
    special = [*loaded.all_special_tokens, *map(str, loaded.added_tokens_decoder.values())]
    special = list(dict.fromkeys([*special, *getattr(loaded, "lang_token_to_id", ())]))
    codes: Sequence[str] = getattr(loaded, "supported_language_codes", ())
    described = json.loads(convert_sentencepiece(file, {})[0].to_str())
    controls = {token["content"] for token in described["added_tokens"]}
    lacking = _renumber(described["model"], loaded, {*special, *codes}, controls)
    described["added_tokens"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(_OF_ANSWERS, "\U0010fffd"), backend.normalizer])
    backend.decoder = decoders.Sequence([decoders.Replace(_OF_ANSWERS, ""), backend.decoder])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
    _put_around(backend, loaded)
    _compare(backend, loaded, lacking)
    return backend


def _renumber(model: dict[str, Any], loaded: Any, added: set[str], controls: set[str]) -> set[str]:
    """Give the pieces of a model their ids; return those that have none, which it then no longer makes.

    Args:
        added: Tokens that stand for themselves in a text.
        controls: Pieces that the model makes of no text.

    Raises:
        InexactError: Merges go by a piece that has none, or many have none.
    """
    scores: dict[str, float] = dict(model["vocab"])
    known = {text for text in scores if loaded.convert_tokens_to_ids(text) != loaded.unk_token_id} | {loaded.unk_token}
    lacking = scores.keys() - known - controls
    size = max(len(loaded), 1 + max(loaded.convert_tokens_to_ids([*added]), default=0))
    own = known - controls | added
    texts = [text if text in own else _OF_ANSWERS + text for text in loaded.convert_ids_to_tokens(range(size))]
    if len(lacking) > _MOST_LACKING * len(scores):
        raise InexactError(f"{len(lacking)} of {len(scores)} pieces of the model have no id in its vocab.json")
    if model["type"] == "Unigram":
        worst = min(scores.values())
        model |= {"vocab": [(text, scores.get(text, worst)) for text in texts], "unk_id": loaded.unk_token_id}
    elif lacking:
        raise InexactError(f"the piece {min(lacking)!r} of the model has no id")
    else:
        model["vocab"] = {text: index for index, text in enumerate(texts)}
    return lacking


def _put_around(backend: tokenizers.Tokenizer, loaded: Any) -> None:
    """What transformers puts before and behind a prompt."""
    mark = loaded.unk_token_id
    ids = loaded.build_inputs_with_special_tokens([mark])
    texts = ["$A" if token_id == mark else loaded.convert_ids_to_tokens(token_id) for token_id in ids]
    named = [(text, token_id) for text, token_id in zip(texts, ids, strict=True) if token_id != mark]
    backend.post_processor = processors.TemplateProcessing(single=" ".join(texts), special_tokens=named)


def _compare(backend: tokenizers.Tokenizer, loaded: Any, lacking: set[str]) -> None:
    """Refuse a tokenizer of which a line has other ids; pieces without an id are <unk> to transformers, not to us.

    Of a unigram model, cuts with the same pieces in another order are as probable.
    """
    in_order = sorted if isinstance(backend.model, models.Unigram) else list
    for line in ODD_LINES:
        ids = backend.encode(line).ids
        if lacking.isdisjoint(loaded.tokenize(line)) and in_order(ids) != in_order(loaded(line).input_ids):
            raise InexactError(f"it cannot be converted exactly: {line!r} would have other ids than in transformers")
