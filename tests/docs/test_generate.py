"""The generated parts of the documentation are up to date, and say what is so."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from docs.architectures import render_data
from docs.generate import DATA, PAGES, PARTS, ROOT, TABLE, render_edits, render_figures, render_served, update
from docs.parameters import treatments
from weft.server.apis.anthropic.body import REFUSED_IN_MESSAGES
from weft.server.apis.anthropic.schema import MessagesBody
from weft.server.apis.decisions.schema import DecisionBody
from weft.server.apis.llama_cpp.route import REFUSED_IN_LLAMA_CPP, InfillBody, LlamaCppCompletionBody
from weft.server.apis.ollama.body import (
    REFUSED_IN_OLLAMA_CHAT,
    REFUSED_IN_OLLAMA_GENERATE,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from weft.server.apis.openai.chat import REFUSED_IN_CHAT
from weft.server.apis.openai.completions import REFUSED_IN_COMPLETIONS
from weft.server.task.bodies import ChatCompletionBody, CompletionBody
from weft.server.task.validation import REFUSED_EVERYWHERE, ignored_fields
from weft.server.task.vectors import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_generated_parts_are_up_to_date(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert update(page, PARTS) == page, "run `make docs`"


def test_every_part_stands_in_one_place() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert sorted(re.findall(r"^<!-- generated: (\S+) -->$", pages, re.MULTILINE)) == sorted(PARTS)
    assert sorted(re.findall(r"^<!-- /generated: (\S+) -->$", pages, re.MULTILINE)) == sorted(PARTS)


def test_a_part_is_made_anew_and_the_rest_stays() -> None:
    page = (
        "one\n<!-- generated: a -->\nold\n<!-- /generated: a -->\ntwo\n<!-- generated: b -->\n<!-- /generated: b -->\n"
    )
    assert update(page, {"a": lambda: "new\\1\n", "b": lambda: "more\n"}) == (
        "one\n<!-- generated: a -->\nnew\\1\n<!-- /generated: a -->\ntwo\n"
        "<!-- generated: b -->\nmore\n<!-- /generated: b -->\n"
    )


def test_a_part_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(KeyError, match="'c'"):
        update("<!-- generated: c -->\n<!-- /generated: c -->", {})


def test_figures_are_medians_and_ratios_to_the_first_server(tmp_path: Path) -> None:
    lines = [
        {"row": {"title": "first token", "unit": "ms"}, "medians": {"Weft": 290.0, "vLLM": 387.4}},
        {"row": {"title": "output", "unit": "tok/s"}, "medians": {"Weft": 4023.0, "vLLM": 65.6}},
    ]
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"servers": ["Weft", "vLLM"], "lines": lines}), encoding="utf-8")
    assert render_figures(run) == (
        "| | Weft | vLLM |\n"
        "| --- | ---: | ---: |\n"
        "| first token | 290 ms | 387 ms (0.75x) |\n"
        "| output | 4,023 tok/s | 65.6 tok/s (61.33x) |\n"
    )


def test_figures_of_real_files_have_a_column_for_each_model_and_server(tmp_path: Path) -> None:
    figures: list[dict[str, Any]] = [
        {"model": model, "title": title, "unit": unit, "values": {"Weft": [weft, weft / 2, 9e9], "peer": [peer]}}
        for model, title, unit, weft, peer in (
            *(("a.gguf", "token", "ms", 12.0, 24.0), ("a.gguf", "output", "tok/s", 300.0, 100.0)),
            *(("b.gguf", "token", "ms", 5.0, 4.0), ("b.gguf", "output", "tok/s", 90.0, 45.0)),
        )
    ]
    figures[1]["values"]["peer"] = []  # it failed
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"servers": ["Weft", "peer"], "figures": figures}), encoding="utf-8")
    assert render_served(run) == (
        "| | a.gguf: Weft | a.gguf: peer | b.gguf: Weft | b.gguf: peer |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| token | 12.0 ms | 24.0 ms (0.50x) | 5.00 ms | 4.00 ms (1.25x) |\n"
        "| output | 300 tok/s | - | 90.0 tok/s | 45.0 tok/s (2.00x) |\n"
    )


def test_gains_of_speculation_are_ratios_to_plain_decoding(tmp_path: Path) -> None:
    figures = [
        {"model": "a", "task": "edit", "speeds": {"plain": [10.0, 10.0, 90.0], "n-gram": [25.0]}},
        {"model": "b", "task": "edit", "speeds": {"plain": [20.0], "n-gram": [19.0], "its 4 bits": [30.0]}},
    ]
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"figures": figures}), encoding="utf-8")
    assert render_edits(run) == (
        "| | | plain | n-gram | its 4 bits |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| a | edit | 10.0 tok/s | 25.0 tok/s (2.50x) | - |\n"
        "| b | edit | 20.0 tok/s | 19.0 tok/s (0.95x) | 30.0 tok/s (1.50x) |\n"
    )


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (ChatCompletionBody, REFUSED_IN_CHAT),
        (CompletionBody, REFUSED_IN_COMPLETIONS),
        (MessagesBody, REFUSED_IN_MESSAGES),
        (DecisionBody, REFUSED_EVERYWHERE),
        (LlamaCppCompletionBody, REFUSED_IN_LLAMA_CPP),
        (InfillBody, REFUSED_IN_LLAMA_CPP),
        (OllamaChatBody, REFUSED_IN_OLLAMA_CHAT),
        (OllamaGenerateBody, REFUSED_IN_OLLAMA_GENERATE),
        (OllamaEmbedBody, REFUSED_EVERYWHERE),
        (OllamaEmbeddingsBody, REFUSED_EVERYWHERE),
        (EmbeddingBody, REFUSED_EVERYWHERE),
        (PoolingBody, REFUSED_EVERYWHERE),
        (ClassifyBody, REFUSED_EVERYWHERE),
        (ScoreBody, REFUSED_EVERYWHERE),
        (RerankBody, REFUSED_EVERYWHERE),
    ],
)
def test_the_parameters_table_says_accepted_of_what_is_reported(
    body: type[BaseModel], refused: Mapping[str, tuple[object, ...]]
) -> None:
    value: Any = "anything"
    ignored = {
        name
        for name in body.model_fields
        if ignored_fields(body.model_construct(**{name: value}), refused, strict=False) == [name]
    }
    assert {name for name, treatment in treatments(body, refused).items() if treatment == "accepted"} == ignored


def test_what_weft_models_prints_is_up_to_date() -> None:
    assert DATA.read_text(encoding="utf-8") == render_data(TABLE), "run `make docs`"
