"""Makes a tokenizer.json from another kind of tokenizer: `python -m weft.engine.shared.convert_tokenizer`.

It imports transformers, which a server must not, so it runs in a process of its own. A SentencePiece model
becomes what SentencePiece itself does with it, with one exception, as in transformers: text that begins with a space
gets no second one as a prefix. So text after a control token needs no exception.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_CONTROL, _USER_DEFINED = 3, 4  # SentencePiece's types of pieces


def convert(folder: Path, name: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in this file of a checkpoint, and its special tokens by name.

    Raises:
        ImportError: A package is missing; the message says how to install it.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if name == "tokenizer.model":
        return _from_sentencepiece(folder / name, config)
    if name == "tekken.json":
        return _from_tekken(folder / name, config)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = {key: value for key in _NAMES if isinstance(value := getattr(loaded, key, None), str)}
    return loaded.backend_tokenizer, named


def _from_tekken(file: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    backend = MistralConverter(str(file)).converted()
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named = {key: text for key, text in named.items() if backend.token_to_id(text) is not None}
    _frame(backend, named, config, processors.ByteLevel(trim_offsets=False))
    return backend, named


def _from_sentencepiece(file: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        import google.protobuf  # noqa: F401 (the extractor would fail with a longer message)
        import sentencepiece  # noqa: F401
    except ImportError:
        raise ImportError("this needs a package more: pip install 'weft[sentencepiece]'") from None
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter

    extractor: Any = SentencePieceExtractor(str(file))  # its types are of another version
    converter: Any = SpmConverter
    extracted = extractor.extract(None)
    proto = extractor.proto
    backend = converter.build_tokenizer_from_spm_proto(proto, extracted["vocab"], extracted.get("merges"))
    rules = proto.normalizer_spec
    # Versions of transformers differ in what is beside the model.
    backend.pre_tokenizer = None
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        if rules.remove_extra_whitespaces:  # the scheme "first" gives text that was stripped no prefix
            steps += [normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")]
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps.append(normalizers.Replace(" ", "▁"))
    by_bytes = [decoders.ByteFallback()] if proto.trainer_spec.byte_fallback else []
    prefix = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *by_bytes, decoders.Fuse(), *prefix])
    backend.normalizer = normalizers.Sequence(steps)
    special = [piece.piece for piece in proto.pieces if piece.type == _CONTROL]
    plain = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0])):
        backend.add_tokens([AddedToken(token["content"], normalized=False, special=token.get("special", False))])
    spec = proto.trainer_spec
    pieces = (("bos_token", spec.bos_id), ("eos_token", spec.eos_id), ("unk_token", spec.unk_id))
    named = {key: proto.pieces[piece_id].piece for key, piece_id in pieces if piece_id >= 0}
    _frame(backend, named, config, None)
    return backend, named


def _frame(backend: tokenizers.Tokenizer, named: dict[str, str], config: dict[str, Any], inner: Any) -> None:
    """Put tokens around a prompt as the configuration says; without it, the beginning of a sequence before it."""
    begin = named.get("bos_token") if config.get("add_bos_token", True) else None
    end = named.get("eos_token") if config.get("add_eos_token", False) else None
    around = [text for text in (begin, end) if text is not None]
    if around:
        template = " ".join(text for text in (begin, "$A", end) if text is not None)
        tokens = [(text, backend.token_to_id(text)) for text in around]
        framed = processors.TemplateProcessing(single=template, special_tokens=tokens)
        backend.post_processor = processors.Sequence([inner, framed]) if inner else framed


def main() -> None:
    """Arguments: the checkpoint, the name of its tokenizer's file, an empty folder for what is made."""
    folder, name, out = sys.argv[1:]
    try:
        backend, named = convert(Path(folder), name)
    except Exception as error:  # one line for whoever reads it
        raise SystemExit(" ".join(str(error).split())[:500] or type(error).__name__) from None
    (Path(out) / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    backend.save(str(Path(out) / "tokenizer.json"))


if __name__ == "__main__":
    main()
