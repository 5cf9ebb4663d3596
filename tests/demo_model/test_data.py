"""What the demo model is trained on, and whether the shipped checkpoint learned it."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from random import Random
from typing import Any

import httpx
import pytest
import torch
import typer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from demo_model import asking, generate, score, skills, train
from demo_model.skill import Pool, Reply, user
from demo_model.skills import values
from demo_model.skills.lists import HELD_OUT_WORDS
from demo_model.tokenizer import encode_conversation

DEMO_MODEL = Path(__file__).parents[2] / "server" / "demo_model"


def test_conversations_and_exams_repeat_for_a_seed() -> None:
    assert generate.conversation(Random(5), 6) == generate.conversation(Random(5), 6)
    assert generate.conversation(Random(5), 6) != generate.conversation(Random(6), 6)
    assert generate.exam("addition", 20, seed=5) == generate.exam("addition", 20, seed=5)
    assert generate.exam("addition", 20, seed=5) != generate.exam("addition", 20, seed=6)


def test_no_exam_question_is_ever_trained() -> None:
    random = Random(1)
    chats = [generate.conversation(random, 2) for _ in range(10_000)]
    trained = {message["content"] for chat in chats for message in chat.messages if message["role"] == "user"}
    for skill in generate.EXAMINED_SKILLS:
        assert not trained.intersection(question.exchange.asked for question in generate.exam(skill, 100)), skill


def test_a_chat_holds_one_thing_to_remember_and_tools_or_thoughts_only_where_they_belong() -> None:
    random = Random(3)
    for _ in range(3000):
        chat = generate.conversation(random, 4)
        told = [message for message in chat.messages if re.match("My name is [A-Z]", message["content"])]
        assert len(told) <= 1, chat
        assert chat.tools or not any("tool_calls" in message for message in chat.messages)
        thoughts = [i for i, message in enumerate(chat.messages) if message.get("reasoning_content")]
        assert thoughts == ([len(chat.messages) - 1] if chat.thinks else [])


def test_batches_repeat_for_a_step_and_differ_between_steps() -> None:
    plan, tokenizer = train.Plan(), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    first, again, other = (train.make_batch(plan, step, tokenizer) for step in (3, 3, 4))
    assert first.token_ids.equal(again.token_ids)
    assert not first.token_ids.equal(other.token_ids)
    assert first.token_ids.shape == (plan.num_rows, plan.row_length)
    assert train.make_batch(plan, plan.longest_row_every - 2, tokenizer).token_ids.shape == (1, 4096)


def test_tokens_of_another_conversation_are_masked() -> None:
    same = torch.zeros(1, 2, dtype=torch.bool)
    batch = train.PackedBatch(torch.tensor([[4, 5, 6]]), same, torch.tensor([[0, 0, 1]]))
    assert batch.attention_mask().tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


def test_the_rate_rises_and_falls() -> None:
    plan = train.Plan(num_steps=6, num_warmup_steps=2)
    rates = [train.share_of_rate(plan, step) for step in range(6)]
    assert rates == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, train.Plan]:
    """A checkpoint of a tiny model."""
    plan = train.Plan(shape=train.Shape(1, 64, 64), num_steps=8, num_rows=1, row_length=64)
    folder = tmp_path_factory.mktemp("training")
    model, optimizers = _tiny(plan)
    train.save(folder / "checkpoint.pt", plan, model, optimizers, 4)
    return folder / "checkpoint.pt", plan


def _tiny(plan: train.Plan) -> tuple[Any, list[torch.optim.Optimizer]]:
    model = train.make_model(plan)
    return model, train.make_optimizers(plan, model)


def test_a_run_goes_on_where_it_stopped(resumable: tuple[Path, train.Plan]) -> None:
    path, plan = resumable
    assert train.resume(path, plan, *_tiny(plan)) == 4
    assert train.resume(path.parent / "none.pt", plan, *_tiny(plan)) == 0


@pytest.mark.parametrize("change", [{"num_steps": 7}, {"seed": 12}, {"matrix_learning_rate": 0.1}])
def test_another_plan_is_refused(resumable: tuple[Path, train.Plan], change: dict[str, Any]) -> None:
    path, plan = resumable
    with pytest.raises(typer.BadParameter, match="belongs to another plan"):
        train.resume(path, replace(plan, **change), *_tiny(plan))


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("Hello!<|im_end|><|endoftext|>", Reply("Hello!")),
        ("One. Two.\n</think>3", Reply("3", "One. Two.")),
        (
            '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "c", "arguments": {}}\n</tool_call>',
            Reply("", "", (("a", {"b": 1}), ("c", {}))),
        ),
        ("<tool_call>\n{broken\n</tool_call>", Reply()),
    ],
)
def test_replies_are_read(text: str, reply: Reply) -> None:
    assert train.read_reply(text) == reply


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return Qwen3ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16)


def test_training_sees_chats_as_the_shipped_template_renders_them(tokenizer: Any) -> None:
    random = Random(2)
    kinds = set()
    for _ in range(300):
        chat = generate.conversation(random, random.randint(1, 4))
        messages = list(chat.messages)
        encoded, is_learned = encode_conversation(tokenizer.backend_tokenizer, messages, chat.tools)
        kwargs = {"tools": list(chat.tools) or None, "return_dict": False}
        assert encoded == tokenizer.apply_chat_template(messages, **kwargs)
        asked = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, enable_thinking=chat.thinks, **kwargs
        )
        assert encoded[: len(asked)] == asked
        assert not is_learned[len(asked) - 1]
        assert all(is_learned[len(asked) : -1])
        assert tokenizer.decode(encoded[-2:]) == "<|im_end|>\n"
        assert is_learned.count(True) >= sum(message["role"] == "assistant" for message in messages)
        kinds.add((bool(chat.tools), chat.thinks))
    assert kinds == {(False, False), (True, False), (False, True)}


def test_words_that_chats_are_about_are_letters_and_the_others_are_whole(tokenizer: Any) -> None:
    """So that a word of the exam, or of a user, has no other tokens than those of training."""
    for word in (*values.NAMES.held_out, *HELD_OUT_WORDS):
        assert len(tokenizer.tokenize(word)) == len(word)
    for word in ("Hello", "Autoregressive", "tokens", "temperature"):
        assert tokenizer.tokenize(word) == [word]


def test_every_digit_is_one_token(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize("What is 12 + 34?")
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "3", "4"]


def test_shipped_files_fit_and_agree() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.rglob("*")) <= 16_000_000
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 4096
    assert json.loads((DEMO_MODEL / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == config["vocab_size"]
    assert [vocabulary[token] for token in ("<|im_end|>", "<|endoftext|>")] == [2, 0]


def test_shipped_model_ends_its_turn(model: Any, tokenizer: Any) -> None:
    chats = [[user(text)] for text in ("Hello", "What is 3 + 4?", "Who are you?")]
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
        return httpx.Response(200, json={"choices": [{"message": {"content": "30 + 40 = 70."}}]})

    async def run() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
            table = await score.score(client, number=60, seed=0, show_wrong=False)
        return [str(cell) for cell in table.columns[0].cells], [str(cell) for cell in table.columns[1].cells]

    skills, num_right = asyncio.run(run())
    expected = Reply("30 + 40 = 70.")
    right = [sum(question.is_right(expected) for question in generate.exam(skill, 60)) for skill in skills]
    assert skills == list(generate.EXAMINED_SKILLS)
    assert num_right == [str(number) for number in right]
    assert 0 < sum(right) < 60


def test_score_sends_tools_schemas_and_thinking() -> None:
    call, schema, thought = (
        score.body_of("demo", generate.exam(skill, 1)[0]) for skill in ("tool call", "schema", "thinking")
    )
    assert call["tools"][0]["type"] == "function"
    assert schema["response_format"]["json_schema"]["schema"]["type"] == "object"
    assert thought["chat_template_kwargs"] == {"enable_thinking": True}


def test_score_shows_what_a_failing_server_says() -> None:
    async def run() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(503, text="no engine"))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await score.ask(client, "demo", generate.exam("greeting", 1)[0])

    with pytest.raises(httpx.HTTPStatusError) as raised:
        asyncio.run(run())
    assert raised.value.__notes__ == ["no engine"]


def pools_in(value: object) -> Iterator[Pool[object]]:
    """All pools in a module's values, however deep."""
    if isinstance(value, Pool):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from pools_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from pools_in(getattr(value, field.name))


def spellings(template: str) -> set[str]:
    """All that `fill` can make of a template, without case and marks; values stay open."""
    group = re.search(r"\[([^\[\]]*)\]", template)
    if group is None:
        return {" ".join(re.findall(r"[\w{}]+", template.casefold()))}
    before, after = template[: group.start()], template[group.end() :]
    return {spelled for choice in group[1].split("|") for spelled in spellings(before + choice + after)}


def test_no_phrasing_of_the_exam_can_be_spelled_from_those_of_training() -> None:
    """Messages differ in their values, so that none is seen twice does not say that its phrasing is new."""
    modules = [asking, *(import_module(f"{skills.__name__}.{module.name}") for module in iter_modules(skills.__path__))]
    pools = [pool for module in modules for value in vars(module).values() for pool in pools_in(value)]
    num_phrasings = 0
    for pool in pools:
        held_out = {phrasing for text in pool.held_out if isinstance(text, str) for phrasing in spellings(text)}
        trained = {phrasing for text in pool.training if isinstance(text, str) for phrasing in spellings(text)}
        shared = {phrasing for phrasing in held_out & trained if len(phrasing.replace("{v}", "").split()) > 1}
        assert not shared, "a value alone or an article may be both"
        num_phrasings += len(held_out)
    assert num_phrasings > 300
