"""A model with an encoder through `weft serve` and the SDK answers as transformers generates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import M2M100ForConditionalGeneration

from tests.end_to_end.conftest import LiveServer, serving
from tests.seq2seq_checkpoints import FRENCH, letters, write_translator

TEXTS = ["hello, world.", "the ring", "a b c d: e f g"]
STATED = {
    "num_beams": 3,
    "length_penalty": 1.5,
    "early_stopping": True,
    "max_length": 24,
    "min_length": 12,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[14], [20, 21]],
    "suppress_tokens": [16],
    "begin_suppress_tokens": [*range(4, 16)],
    "forced_eos_token_id": 1,
    "renormalize_logits": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("translator")


@pytest.fixture(scope="module")
def reference(folder: Path) -> M2M100ForConditionalGeneration:
    return write_translator(folder, **STATED)


@pytest.fixture(scope="module")
def server(
    folder: Path, reference: M2M100ForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(log, str(folder), "--served-model-name", "m", "--dtype", "float32") as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def translated(
    reference: M2M100ForConditionalGeneration, text: str, source: str = "", target: str = "", **options: Any
) -> list[str]:
    tokenizer = letters()
    ids = tokenizer.encode(text).ids
    if source:
        ids[0] = tokenizer.token_to_id(source)
    forced = {"forced_bos_token_id": tokenizer.token_to_id(target)} if target else {}
    with torch.no_grad():
        outputs = reference.generate(torch.tensor([ids]), **forced, **options)
    return [tokenizer.decode(row.tolist()) for row in outputs]


def test_the_search_of_the_checkpoint_is_run(client: openai.OpenAI, reference: M2M100ForConditionalGeneration) -> None:
    answer = client.completions.create(model="m", prompt=TEXTS, n=2)
    expected = [text for each in TEXTS for text in translated(reference, each, num_return_sequences=2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage and answer.usage.prompt_tokens == sum(len(letters().encode(text).ids) for text in TEXTS)
    greedy = client.completions.create(
        model="m", prompt=TEXTS[0], temperature=0, max_tokens=14, extra_body={"seed": 3, "top_k": 1}
    )
    assert greedy.choices[0].text == translated(reference, TEXTS[0], num_beams=1, max_new_tokens=14)[0]


def test_what_is_no_search_is_none(client: openai.OpenAI, reference: M2M100ForConditionalGeneration) -> None:
    """A temperature of 1 was searched, and five choices of a search for three were the same one."""
    wide = client.completions.create(model="m", prompt=TEXTS[0], n=5)
    expected = translated(reference, TEXTS[0], num_beams=5, num_return_sequences=5)
    assert [choice.text for choice in wide.choices] == expected
    drawn = client.completions.create(model="m", prompt=TEXTS[0], n=4, temperature=1, seed=1)
    assert len({choice.text for choice in drawn.choices}) == 4
    assert {choice.text for choice in drawn.choices}.isdisjoint(expected)


def test_languages_are_those_of_the_tokenizer(client: openai.OpenAI, reference: M2M100ForConditionalGeneration) -> None:
    languages = {"source_language": FRENCH, "target_language": FRENCH}
    answer = client.completions.create(model="m", prompt=TEXTS[0], extra_body=languages)
    assert answer.choices[0].text == translated(reference, TEXTS[0], FRENCH, FRENCH)[0]
    assert answer.choices[0].text != client.completions.create(model="m", prompt=TEXTS[0]).choices[0].text
    ids = letters().encode(TEXTS[0], add_special_tokens=False).ids
    of_ids = client.completions.create(model="m", prompt=[*ids, 1], extra_body=languages)
    assert of_ids.choices[0].text == answer.choices[0].text
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        client.completions.create(model="m", prompt="ab", extra_body=languages | {"truncate_prompt_tokens": 1})
    for name in ("deu_Latn", "</s>", "hello"):
        with pytest.raises(openai.BadRequestError, match="target_language") as caught:
            client.completions.create(model="m", prompt=TEXTS[0], extra_body={"target_language": name})
        assert caught.value.param == "target_language"


def test_a_chat_is_its_last_message(client: openai.OpenAI, reference: M2M100ForConditionalGeneration) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": TEXTS[1]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]},
    ]
    whole = client.chat.completions.create(model="m", messages=messages)
    stream = client.chat.completions.create(model="m", messages=messages, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    response = client.responses.create(model="m", input=messages[-1:])
    expected = translated(reference, TEXTS[0])[0]
    assert whole.choices[0].message.content == streamed == response.output_text == expected
    begun = [*messages, {"role": "assistant", "content": "a"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        client.chat.completions.create(model="m", messages=begun, extra_body=body)


def test_what_does_not_fit_is_refused_by_name(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="reads at most 96 tokens") as caught:
        client.completions.create(model="m", prompt="abc " * 100)
    assert caught.value.code == "context_length_exceeded"
    body = {"truncate_prompt_tokens": -1}
    whole = client.completions.create(model="m", prompt=[5] * 99, max_tokens=23, extra_body=body)
    assert whole.usage and whole.usage.prompt_tokens == 96  # as many as if nothing were written
    with pytest.raises(openai.BadRequestError, match="echo is only allowed"):
        client.completions.create(model="m", prompt="a", echo=True)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(model="m", prompt="a", extra_body={"prompt_logprobs": 1})
    assert "no chat template" not in server.log.read_text()
