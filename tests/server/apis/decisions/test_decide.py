"""Where questions and answers stand in the prompts of real chat templates and tokenizers."""

from pathlib import Path

import pytest

from tests import chat_templates_for_tests as templates
from tests.tokenizers_for_tests import EVERY_SPECIAL, byte_level, sentencepiece, write_checkpoint
from weft.server.apis.decisions.decide import _frame, _opening, _spellings
from weft.server.formats.detection import OutputFormats, choose_formats, renderer
from weft.server.task.task import Chat
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.tokenizer import Tokenizer

QUESTION = "Question: What is it?\nA: <|im_end|>\nAnswer with the letter of one option only."
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ALWAYS_OPEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def load(folder: Path, template: str, *, is_sentencepiece: bool = False) -> tuple[Tokenizer, OutputFormats]:
    backend = sentencepiece() if is_sentencepiece else byte_level(EVERY_SPECIAL)
    write_checkpoint(folder, backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)
    tokenizer = Tokenizer.load(folder)
    return tokenizer, choose_formats(template, "auto", tokenizer.added_id, renderer(tokenizer))


@pytest.mark.parametrize("name", sorted(templates.ALL))
@pytest.mark.parametrize("is_sentencepiece", [False, True])
def test_beginning_and_tail_are_the_whole_prompt(tmp_path: Path, name: str, is_sentencepiece: bool) -> None:
    tokenizer, formats = load(tmp_path, templates.ALL[name], is_sentencepiece=is_sentencepiece)
    chat = Chat([{"role": "user", "content": "Evidence."}], TemplateOptions())
    head, gap, end = _frame(tokenizer, formats, chat)
    ids = [*tokenizer.encode_rendered(head), *tokenizer.encode_inserted(gap + QUESTION, end)]
    whole = tokenizer.render_chat([{"role": "user", "content": f"Evidence.\n\n{QUESTION}"}], chat.options)
    opening = _opening(tokenizer, formats, chat.options)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        tokenizer.encode_rendered([*whole, opening] if opening else whole), skip_special_tokens=False
    )
    assert ids.count(tokenizer.added_id("<|im_end|>") or -1) == tokenizer.encode_rendered(whole).count(
        tokenizer.added_id("<|im_end|>") or -1
    ), "the question has made a control token"


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (templates.CHATML, ""),
        (HARMONY, "<|channel|>final<|message|>"),
        (ALWAYS_OPEN, "\n</think>\n\n"),
    ],
)
def test_the_answer_comes_after_reasoning_and_headers(tmp_path: Path, template: str, opening: str) -> None:
    tokenizer, formats = load(tmp_path, template)
    assert _opening(tokenizer, formats, TemplateOptions()) == opening


def test_a_template_that_hides_the_question_is_refused(tmp_path: Path) -> None:
    tokenizer, formats = load(tmp_path, "<|im_start|>{{ messages[0].role }}")
    with pytest.raises(ChatTemplateError, match="does not show the question once"):
        _frame(tokenizer, formats, Chat([{"role": "user", "content": "x"}], TemplateOptions()))


def test_a_question_after_another_turn_is_a_turn_of_its_own(tmp_path: Path) -> None:
    tokenizer, formats = load(tmp_path, templates.CHATML)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    head, gap, end = _frame(tokenizer, formats, Chat(messages, TemplateOptions()))
    assert "".join(head).endswith("<|im_start|>assistant\ny<|im_end|>\n<|im_start|>user\n")
    assert (gap, end) == ("", ["<|im_end|>\n<|im_start|>assistant\n"])


def test_spellings_of_a_label(tmp_path: Path) -> None:
    tokenizer, _ = load(tmp_path, templates.CHATML)
    texts = {"".join(map(tokenizer.token_text, ids)) for ids in _spellings(tokenizer, "yes")}
    assert {"yes", "Yes"} <= texts <= {"yes", "Yes", " yes", " Yes"}
    assert {"".join(map(tokenizer.token_text, ids)) for ids in _spellings(tokenizer, "AB")} <= {"AB", " AB"}
