"""Converts a SentencePiece model (`tokenizer.model`) to a tokenizer of the tokenizers library that gives the same ids.

What the library cannot do exactly is refused by name. At the end the two encode odd lines (`ODD_LINES`), and a model of
which one differs is refused, too: a wrong prompt would be seen by nobody. Needs sentencepiece and protobuf.

Facts: github.com/google/sentencepiece, `normalizer.cc`, `bpe_model.cc`, `unigram_model.cc`. A merge is ordered by the
score of what it makes, not by its id. A space before all text (`add_dummy_prefix`) is added once, also to text that
begins with one; behind a control token there is none, as in transformers. Control tokens in a text are never found by
SentencePiece; here they are, because chat templates write them.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from weft.engine.wire.bpe import find_merges

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_KINDS = {3: "word"}

ODD_LINES = (
    *("", " ", "a", " a", "  a", "a ", "a  ", "a  b", "a   b    c     d", "\t", "\n", "a\n\n\nb", "\r\n x\r\n"),
    *(" " * size + "x" + " " * (size + 1) for size in (3, 5, 7, 8, 9, 15, 16, 17, 31, 40)),
    *("\t\tif x:\n\t\t\ty\n", "    if x:\n        return [y for y in range(12)]  # two  spaces\n"),
    *("| `field` | text |  |  |   |\n|---|---|", "1234567890 3.14159 1,000 0x1F", "It's I'LL don't"),
    *("aaaaaaa", "ababababa", "aabaabaab", "-" * 77, "=" * 41, "#" * 13, "q" * 60, "0" * 23, "\n" * 20, "......"),
    *("camelCase snake_case a.b.c()", "https://example.org/a?b=c#d", "A\u030a n\u0303", "naïve café Zażółć"),
    *("Съешь ещё", "Ελληνικά", "שלום עולם", "مرحبا", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好\uff0c世界", "こんにちは"),
    *("😀👩‍👩‍👧‍👦👍🏽 🇩🇪", "\ufb01 \uff21\uff4c\u3000\uff11\uff12 ½ ①", "a\u00a0b\u3000c\u200bd\u2028e", "\ufffd"),
    *("\ue000", "\U0001d573\U0001d58a 𐍈", "\u00adx\ufeff", "▁", "▁▁a", "a▁b ▁ c", "<0x0A>", "<unk>x", "a\x7fb"),
)  # fmt: skip
"""Texts in which conversions go wrong: white space, repetitions, other scripts, text that looks like a token."""
_MAX_NUM_DEFINED = 64
_ALL_SPACES = 1 << 20


class InexactError(Exception):
    """The model cannot be converted exactly; one line."""


def need_sentencepiece() -> None:
    """Raise ImportError if a package is missing; the message says how to install it."""
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        raise ImportError("this needs a package more: pip install 'weft[sentencepiece]'") from None


def convert_sentencepiece(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name.

    Args:
        config: The checkpoint's tokenizer_config.json, whose `added_tokens_decoder` is honoured.

    Raises:
        ImportError: A package is missing; the message says how to install it.
        InexactError: The library cannot do what the model asks for.
    """
    need_sentencepiece()
    from sentencepiece import SentencePieceProcessor
    from sentencepiece import sentencepiece_model_pb2 as formats

    proto: Any = vars(formats)["ModelProto"].FromString(file.read_bytes())  # the module fills itself
    _refuse_what_is_unknown(proto)
    original = SentencePieceProcessor(model_file=str(file))
    backend = tokenizers.Tokenizer(_model(proto))
    _set_steps(backend, proto)
    _compare(backend, original, proto)
    special = [piece.piece for piece in proto.pieces if piece.type == _CONTROL]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0])):
        backend.add_tokens([AddedToken(token["content"], normalized=False, special=token.get("special", False))])
    spec = proto.trainer_spec
    pieces = (("bos_token", spec.bos_id), ("eos_token", spec.eos_id), ("unk_token", spec.unk_id))
    return backend, {key: proto.pieces[piece_id].piece for key, piece_id in pieces if piece_id >= 0}


def _refuse_what_is_unknown(proto: Any) -> None:
    kind, rules = proto.trainer_spec.model_type, proto.normalizer_spec
    faults = {
        f"models of type {_KINDS.get(kind, kind)}": kind not in (_UNIGRAM, _BPE, _CHAR),
        "spaces as suffixes (treat_whitespace_as_suffix)": proto.trainer_spec.treat_whitespace_as_suffix,
        "spaces that stay spaces (escape_whitespaces false)": not rules.escape_whitespaces,
        "a denormalizer": bool(proto.denormalizer_spec.precompiled_charsmap),
        "unused pieces in BPE": kind == _BPE and any(piece.type == _UNUSED for piece in proto.pieces),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise InexactError(f"SentencePiece with {fault} is not supported; the model needs a tokenizer.json")


def _model(proto: Any) -> models.Model:
    spec, pieces = proto.trainer_spec, proto.pieces
    unknown = next((index for index, piece in enumerate(pieces) if piece.type == _UNKNOWN), None)
    if spec.model_type == _UNIGRAM:
        return models.Unigram(_scored(pieces), unk_id=unknown, byte_fallback=spec.byte_fallback)
    order = {piece.piece: -piece.score for piece in pieces if piece.type == _NORMAL}
    return models.BPE(
        vocab={piece.piece: index for index, piece in enumerate(pieces)},
        merges=find_merges(order) if spec.model_type == _BPE else [],
        unk_token=None if unknown is None else pieces[unknown].piece,
        fuse_unk=True,
        ignore_merges=any(piece.type == _USER_DEFINED for piece in pieces),
        byte_fallback=spec.byte_fallback,
    )


def _scored(pieces: Sequence[Any]) -> list[tuple[str, float]]:
    """Pieces with the scores that SentencePiece counts with: those that users defined have a bonus."""
    worst = min((piece.score for piece in pieces if piece.type == _NORMAL), default=0.0)
    scores = {_USER_DEFINED: 1.0, _UNUSED: 16 * worst}
    return [(piece.piece, piece.score if piece.type == _NORMAL else scores.get(piece.type, worst)) for piece in pieces]


def _set_steps(backend: tokenizers.Tokenizer, proto: Any) -> None:
    """What happens to a text before and after the model."""
    rules, spec = proto.normalizer_spec, proto.trainer_spec
    normal, before = _normalizers(rules)
    before += _splits(proto.pieces, is_unigram=spec.model_type == _UNIGRAM)
    backend.normalizer = normalizers.Sequence(normal)
    backend.pre_tokenizer = pre_tokenizers.Sequence(before) if before else None
    by_bytes = [decoders.ByteFallback()] if spec.byte_fallback else []
    num_spaces = _ALL_SPACES if rules.remove_extra_whitespaces else int(rules.add_dummy_prefix)
    cut = [decoders.Strip(" ", num_spaces, 0)] if num_spaces else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *by_bytes, decoders.Fuse(), *cut])


def _splits(pieces: Sequence[Any], is_unigram: bool) -> list[Any]:
    """Where a text is cut, so that the model takes the pieces of it that SentencePiece would.

    The pieces that users defined are cut out, and BPE takes them whole (`ignore_merges`); in a unigram model their
    scores find them. Text that happens to be what the unknown piece or a byte is called is cut behind its first
    character: the library would take it for that token, where it can.
    """
    defined = sorted((piece.piece for piece in pieces if piece.type == _USER_DEFINED), key=len, reverse=True)
    if not is_unigram and not defined:
        return []
    names = [piece.piece for piece in pieces if piece.type in (_UNKNOWN, _BYTE) and len(piece.piece) > 1]
    rests = {name[0]: [_escaped(other[1:]) for other in names if other[0] == name[0]] for name in names}
    start, end = ("", "") if is_unigram else (r"\A", r"\z")
    by_chance = "|".join(f"{start}{_escaped(first)}(?=(?:{'|'.join(rest)}){end})" for first, rest in rests.items())
    steps = [pre_tokenizers.Split(Regex(by_chance), "merged_with_previous")] if names else []
    if not is_unigram:
        steps.insert(0, pre_tokenizers.Split(Regex("|".join(map(_escaped, defined))), "isolated"))
    return steps


def _escaped(text: str) -> str:
    return re.sub(r"([!-/:-@\[-^`{-~])", r"\\\1", text)


def _normalizers(rules: Any) -> tuple[list[Any], list[Any]]:
    """Steps over a whole text, and over what stands between control tokens.

    The prefix is a space that Metaspace puts before the first piece of a text, if that begins with none: a real one is
    "▁" by then, unless it takes the place of several. Where characters may vanish the first piece does not begin where
    the text does, and Metaspace finds no first; so the prefix stands behind control tokens, too.
    """
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    squeezes, has_prefix, may_vanish = rules.remove_extra_whitespaces, rules.add_dummy_prefix, bool(steps)
    if squeezes:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"[ ▁]+\z"), "")]
    if squeezes and (may_vanish or not has_prefix):
        steps.append(normalizers.Replace(Regex(r"\A "), ""))
    if has_prefix and may_vanish:
        steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        return steps, []
    if not has_prefix:
        return [*steps, normalizers.Replace(" ", "▁")], []
    steps.append(normalizers.Replace(Regex(r"(?!\A) "), "▁") if squeezes else normalizers.Replace(" ", "▁"))
    prefix = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
    return steps, [prefix, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)]


def _compare(backend: tokenizers.Tokenizer, original: Any, proto: Any) -> None:
    """Refuse a model of which a line has other ids.

    Of a unigram model cuts with the same pieces in another order are as probable, and rounding chooses one.
    """
    in_order = list if proto.trainer_spec.model_type != _UNIGRAM else sorted
    defined = [piece.piece.replace("▁", " ") for piece in proto.pieces if piece.type == _USER_DEFINED]
    around = (f"{text}|a{text}b {text} {text}{text}  c {text}" for text in defined[:_MAX_NUM_DEFINED])
    for line in (*ODD_LINES, *around):
        if in_order(backend.encode(line, add_special_tokens=False).ids) != in_order(original.encode(line)):
            raise InexactError(
                f"the model cannot be converted exactly: {line!r} would have other ids than SentencePiece gives it"
            )
