"""What checkpoints with an encoder say of their answers, and languages by their codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.seq2seq_checkpoints import ENGLISH, EOS, FRENCH, letters
from tests.server.conftest import Site
from weft.engine.wire.messages import BeamOptions
from weft.server.errors import InvalidRequestError
from weft.server.generate.prompts import encode_now
from weft.server.models.seq2seq import Encoded, Seq2Seq, is_of_input, language_id, read_seq2seq, with_source
from weft.server.models.served_model import served_model
from weft.server.task.task import Chat
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.text_tokenizer import TokenRoom
from weft.server.text.tokenizer import Tokenizer


def write(folder: Path, own: dict[str, object] | None = None, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"is_encoder_decoder": True, **config}))
    if own is not None:
        (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    own = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "num_beams": 4, "length_penalty": 2.0}
    lengths = {"max_length": 142, "min_length": 56, "no_repeat_ngram_size": 3, "early_stopping": True}
    found = read_seq2seq(write(tmp_path, {**own, "num_beams": None}, num_beams=2, decoder_start_token_id=7, **lengths))
    assert found == Seq2Seq((2, 0), 142, 56, 3, num_beams=2, length_penalty=2.0, early_stopping=True)
    assert found and found.beams(found.begin, 1) == found.beams(found.begin, 2) == BeamOptions(2.0, True, 2, 1)
    assert found.beams(found.begin, 5) == BeamOptions(2.0, True, 5, 1)  # five choices were five times the same
    answer = Encoded((2, 0), stated=found)
    assert (answer.max_tokens, answer.min_tokens, Encoded((2,), stated=Seq2Seq((2,), 1)).max_tokens) == (140, 54, 1)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, Seq2Seq((0,))),
        ({"bos_token_id": 5}, Seq2Seq((5,))),
        ({"max_new_tokens": 9, "max_length": 20, "min_new_tokens": 2}, Seq2Seq((0,), 10, 3)),
        ({"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [3]}, Seq2Seq((0,), banned=((7,), (8, 9), (3,)))),
        (
            {"begin_suppress_tokens": [3], "forced_eos_token_id": 2, "renormalize_logits": True},
            Seq2Seq((0,), begin_bans=(3,), forced_end_id=2, renormalizes=True),
        ),
        ({"do_sample": True, "num_beams": 4}, Seq2Seq((0,), is_sampled=True)),
        ({"min_length": 0, "max_length": 1}, Seq2Seq((0,), 1)),
    ],
)
def test_what_is_not_stated_is_plain(tmp_path: Path, stated: dict[str, object], expected: Seq2Seq) -> None:
    assert read_seq2seq(write(tmp_path, stated)) == expected


def test_decoders_have_none_and_an_odd_field_does_not_count(tmp_path: Path) -> None:
    assert read_seq2seq(tmp_path) is None
    assert read_seq2seq(write(tmp_path, {"num_beams": "many", "min_length": 7})) == Seq2Seq((0,), min_length=7)
    assert read_seq2seq(write(tmp_path, {}, is_encoder_decoder=False, bos_token_id=[1, 2])) is None


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_chat_is_its_last_message_without_a_template(site: Any, tmp_path: Path, template: str) -> None:
    """That of a T5Gemma was ignored."""
    site.tokenizer.template = template
    served_model(site.engine, site.tokenizer, site.settings.model_copy(update={"model": str(write(tmp_path))}))
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    ids = encode_now(site.tokenizer, Chat(messages, TemplateOptions()), TokenRoom(100))
    rendered = "user: user\nassistant: assistant\nuser: user\nassistant:" if template else "user"
    assert bytes(ids[1:]).decode() == rendered


def test_with_a_template_no_answer_is_continued_either(tmp_path: Path) -> None:
    """The open message went to the encoder, and the decoder began anew."""
    site = Site(model=str(write(tmp_path)))
    site.tokenizer.template = "{{ messages }}"
    site.rebuild()
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    reply = site.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert (reply.status, reply.error["param"]) == (400, "continue_final_message")
    assert site.engine.asked == []


def test_languages(tmp_path: Path) -> None:
    letters().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    english, french, eos = (tokenizer.added_id(text) for text in (ENGLISH, FRENCH, EOS))
    assert english is not None and french is not None and eos is not None
    assert language_id(tokenizer, FRENCH, "target_language") == french
    assert Seq2Seq((2, 0)).begin_in(None, tokenizer) == (2, 0)
    assert Seq2Seq((2, 0)).begin_in(french, tokenizer) == (2, french)
    assert Seq2Seq((english,)).begin_in(french, tokenizer) == (french,)  # mBART's first models
    for name in (EOS, "<pad>", "abc", "unk", "", "x" * 1000):
        with pytest.raises(InvalidRequestError, match="target_language"):
            language_id(tokenizer, name, "target_language")
    assert with_source(tokenizer, [english, 7, 8, eos], french) == [french, 7, 8, eos]
    assert with_source(tokenizer, [7, 8, eos, english], french) == [7, 8, eos, french]
    assert with_source(tokenizer, [7, eos], french) == [french, 7, eos]
    assert with_source(tokenizer, [], french) == [french]
    assert not is_of_input(tokenizer, french)


def test_the_language_of_a_marian_model_begins_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(model=str(write(tmp_path)))
    site.tokenizer.added_ids = {">>fra<<": 300}
    monkeypatch.setattr(site.tokenizer, "token_text", lambda token_id: ">>fra<<" if token_id == 300 else "a")
    site.rebuild()
    assert site.complete(prompt=[97], target_language="fra").status == 200
    given = site.engine.asked[-1].request.input
    assert (given.input_ids, given.token_ids) == ([300, 97], [0])
    assert site.complete(prompt=[97], target_language="deu").error["param"] == "target_language"
    for target in ({}, {"target_language": "fra"}):
        assert site.complete(prompt=[97], source_language="fra", **target).error["param"] == "source_language"
