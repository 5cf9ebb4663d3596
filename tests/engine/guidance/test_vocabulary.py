import json
import shutil
from pathlib import Path

import pytest

from tests.engine.guidance.demo import DEMO_MODEL, VOCAB_SIZE
from weft.engine.guidance.compiler import InvalidGrammarError, load_vocabulary


def test_every_end_of_sequence_id_counts_and_ids_without_text_exist() -> None:
    vocabulary = load_vocabulary(DEMO_MODEL, VOCAB_SIZE + 500, (0, 2)).vocabulary
    assert (vocabulary.vocab_size, vocabulary.eos_tokens) == (VOCAB_SIZE + 500, [0, 2])


def test_without_end_of_sequence_ids_the_library_guesses() -> None:
    assert load_vocabulary(DEMO_MODEL, VOCAB_SIZE, ()).vocabulary.vocab_size == VOCAB_SIZE


def test_what_only_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = next(text for text, i in content["model"]["vocab"].items() if len(text) > 2 and text.isalpha())
    token_id = content["model"]["vocab"][plain]
    assert not load_vocabulary(tmp_path, VOCAB_SIZE, (0,)).vocabulary.is_special_token(token_id)
    for name, declared in (
        ("special_tokens_map.json", {"pad_token": {"content": plain}}),
        ("tokenizer_config.json", {"additional_special_tokens": [plain, "not in the vocabulary"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image": plain}}),
    ):
        (tmp_path / name).write_text(json.dumps(declared))
        vocabulary = load_vocabulary(tmp_path, VOCAB_SIZE, (0,)).vocabulary
        assert vocabulary.is_special_token(token_id), declared
        assert vocabulary.vocab_size == VOCAB_SIZE
        (tmp_path / name).unlink()


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidGrammarError, match=r"needs a tokenizer: .* has no tokenizer: one of"):
        load_vocabulary(tmp_path, VOCAB_SIZE, (0,))


@pytest.mark.parametrize(("eos_token_ids", "content"), [((5000,), None), ((0,), "{}"), ((0,), "not JSON")])
def test_a_tokenizer_that_cannot_be_used_is_named(
    tmp_path: Path, eos_token_ids: tuple[int, ...], content: str | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(content or (DEMO_MODEL / "tokenizer.json").read_text())
    with pytest.raises(InvalidGrammarError, match=r"^grammars cannot use the tokenizer\.json of this checkpoint: "):
        load_vocabulary(tmp_path, VOCAB_SIZE, eos_token_ids)
