"""What the demo model is trained on, and whether the shipped checkpoint learned it."""

import asyncio
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from benchmarks.demo_model import generate, phrasings, score, train
from benchmarks.demo_model.tokenizer import encode_conversation

DEMO_MODEL = Path(__file__).parents[2] / "server" / "demo_model"

# What the demo model promises is held to 95 %; the skills that it picked up beside only must not get lost.
LEAST_RIGHT_OF_40 = {"addition": 38, "greeting": 38, "identity": 38, "refusal": 38}
LEAST_RIGHT_OF_40 |= {"subtraction": 30, "counting": 28, "weft": 30}


def bare(text: str) -> str:
    """Return `text` without case, punctuation and spacing; signs of arithmetic stay."""
    return " ".join(re.findall(r"\w+|[-+*/]", text.casefold()))


@pytest.mark.parametrize("skill", generate.EXAMINED_SKILLS)
def test_held_out_phrasings_are_not_trained(skill: str) -> None:
    trained = {
        bare(opener + phrasing.rstrip(".?!") + closer)
        for trained_skill in generate.SKILLS.values()
        for opener in ("", *(phrasings.OPENERS if trained_skill.is_wrapped else ()))
        for closer in ("", *(phrasings.CLOSERS if trained_skill.is_wrapped else ()))
        for phrasing in trained_skill.phrasings.training
    }
    held_out = {bare(phrasing) for phrasing in generate.SKILLS[skill].phrasings.held_out}
    assert len(held_out) == len(generate.SKILLS[skill].phrasings.held_out)
    assert not held_out & trained


def test_no_exam_question_of_addition_is_ever_a_training_message() -> None:
    random = Random(1)
    trained = {bare(generate.training_turn(random).user) for _ in range(20_000)}
    asked = [bare(question.messages[-1]["content"]) for question in generate.exam("addition", 300)]
    assert not trained.intersection(asked)


def test_addition_has_enough_phrasings() -> None:
    assert len(phrasings.ADDITION.training) >= 25
    assert len(phrasings.ADDITION.held_out) >= 8


def test_conversations_and_exams_repeat_for_a_seed() -> None:
    assert generate.conversation(Random(5), 6) == generate.conversation(Random(5), 6)
    assert generate.conversation(Random(5), 6) != generate.conversation(Random(6), 6)
    assert generate.exam("addition", 20, seed=5) == generate.exam("addition", 20, seed=5)
    assert generate.exam("addition", 20, seed=5) != generate.exam("addition", 20, seed=6)


def test_batches_repeat_for_a_step_and_differ_between_steps() -> None:
    plan, tokenizer = train.Plan(), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    first, again, other = (train.make_batch(plan, step, tokenizer) for step in (3, 3, 4))
    assert first.token_ids.equal(again.token_ids)
    assert not first.token_ids.equal(other.token_ids)
    assert first.token_ids.shape == (8, 256)
    assert train.make_batch(plan, 7, tokenizer).token_ids.shape == (2, 1024)
    assert train.make_batch(plan, 38, tokenizer).token_ids.shape == (1, 4096)


def test_tokens_of_another_conversation_are_masked() -> None:
    same = torch.zeros(1, 2, dtype=torch.bool)
    batch = train.PackedBatch(torch.tensor([[4, 5, 6]]), same, torch.tensor([[0, 0, 1]]))
    assert batch.attention_mask().tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@pytest.mark.parametrize(
    ("skill", "expected", "answer", "right"),
    [
        ("addition", "3 + 4 = 7.", "3 + 4 = 7.", True),
        ("addition", "3 + 4 = 7.", "7", True),
        ("addition", "3 + 4 = 7.", "3 + 4 = 17.", False),
        ("addition", "3 + 4 = 7.", "7 + 4 = 3.", False),
        ("addition", "3 + 4 = 7.", "", False),
        ("subtraction", "3 - 4 = -1.", "3 - 4 = 1.", False),
        ("subtraction", "3 - 4 = -1.", "3 - 4 = -1.", True),
        ("counting", "1, 2, 3.", "1, 2, 3.", True),
        ("counting", "1, 2, 3.", "1, 2, 3, 4.", False),
        ("greeting", "", "Good evening! How can I help you?", True),
        ("greeting", "", generate.REFUSAL_ANSWER, False),
        ("identity", "", generate.IDENTITY_ANSWER, True),
        ("identity", "", generate.REFUSAL_ANSWER, False),
        ("weft", "", generate.WEFT_ANSWER, True),
        ("weft", "", generate.IDENTITY_ANSWER, False),
        ("refusal", "", generate.REFUSAL_ANSWER, True),
        ("refusal", "", generate.IDENTITY_ANSWER, False),
    ],
)
def test_marks(skill: str, expected: str, answer: str, right: bool) -> None:
    assert generate.is_right(generate.Question(skill, (), expected), answer) is right


@pytest.mark.parametrize("skill", generate.EXAMINED_SKILLS)
def test_the_answers_of_training_are_right(skill: str) -> None:
    for question in generate.exam(skill, 50):
        assert generate.is_right(question, question.answer)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16)


def test_training_sees_chats_as_the_shipped_template_renders_them(tokenizer: Any) -> None:
    random = Random(2)
    for _ in range(100):
        messages = generate.conversation(random, random.randint(1, 4))
        encoded, is_learned = encode_conversation(tokenizer.backend_tokenizer, messages)
        assert encoded == tokenizer.apply_chat_template(messages, return_dict=False)
        learned = tokenizer.decode([id_ for id_, by_model in zip(encoded, is_learned, strict=True) if by_model])
        assert learned == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")


def test_every_digit_is_one_token(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize("What is 12 + 34?")
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "3", "4"]


def test_shipped_files_fit_and_agree() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= 6_000_000
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 4096
    assert json.loads((DEMO_MODEL / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == config["vocab_size"]
    assert [vocabulary[token] for token in ("<|im_end|>", "<|endoftext|>")] == [2, 0]


def test_every_skill_has_a_bar() -> None:
    assert set(LEAST_RIGHT_OF_40) == set(generate.EXAMINED_SKILLS)


@pytest.mark.parametrize("skill", generate.EXAMINED_SKILLS)
def test_shipped_model_answers_held_out_questions(skill: str, model: Any, tokenizer: Any) -> None:
    questions = generate.exam(skill, 40)
    answers = train.answers_of(model, tokenizer, questions)
    wrong = [pair for pair in zip(questions, answers, strict=True) if not generate.is_right(*pair)]
    assert len(questions) - len(wrong) >= LEAST_RIGHT_OF_40[skill], wrong


def test_shipped_model_ends_its_turn(model: Any, tokenizer: Any) -> None:
    chats = [[generate.Message(role="user", content=text)] for text in ("Hello", "What is 3 + 4?", "Who are you?")]
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(input_ids=prompt["input_ids"], max_new_tokens=60)
        assert output[0, -1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_score_counts_what_the_server_answers_right() -> None:
    """A server that always gives one sum: that many chats are right, and of the other skills none."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        body = json.loads(request.content)
        assert (body["model"], body["temperature"]) == ("demo", 0)
        return httpx.Response(200, json={"choices": [{"message": {"content": "3 + 4 = 7."}}]})

    async def run() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
            table = await score.score(client, number=60, seed=0, show_wrong=False)
        return [str(cell) for cell in table.columns[0].cells], [str(cell) for cell in table.columns[1].cells]

    skills, num_right = asyncio.run(run())
    num_sevens = sum(question.answer.endswith("= 7.") for question in generate.exam("addition", 60))
    assert skills == list(generate.EXAMINED_SKILLS)
    assert num_sevens > 0
    assert num_right[0] == str(num_sevens)
    assert num_right[2:] == ["0"] * (len(skills) - 2)


def test_score_shows_what_a_failing_server_says() -> None:
    async def run() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(503, text="no engine"))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await score.ask(client, "demo", generate.exam("greeting", 1)[0])

    with pytest.raises(httpx.HTTPStatusError) as raised:
        asyncio.run(run())
    assert raised.value.__notes__ == ["no engine"]
