"""What the README says about parameters, settings and modules is what is there."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.compare.report import format_value
from weft.server.request.fields import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, ignored_fields
from weft.server.request.fields_table import render_table as render_fields_table
from weft.server.request.fields_table import treatments
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.schemas.common import GenerationBody
from weft.server.schemas.completions import CompletionBody
from weft.server.terminal.settings_table import render_table

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def between(name: str) -> str:
    """The part of the README between the markers of that name."""
    parts = re.findall(f"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert len(parts) == 1
    return str(parts[0])


def test_the_parameters_table_is_the_current_one() -> None:
    assert between("parameters") == render_fields_table()


@pytest.mark.parametrize(
    ("body", "refused"), [(ChatCompletionBody, REFUSED_IN_CHAT), (CompletionBody, REFUSED_IN_COMPLETIONS)]
)
def test_the_parameters_table_says_accepted_of_what_is_reported(
    body: type[GenerationBody], refused: Mapping[str, tuple[object, ...]]
) -> None:
    value: Any = "anything"
    ignored = {
        name
        for name in body.model_fields
        if ignored_fields(body.model_construct(**{name: value}), refused, strict=False) == [name]
    }
    assert {name for name, treatment in treatments(body, refused).items() if treatment == "accepted"} == ignored


def test_the_settings_table_is_the_current_one() -> None:
    assert between("settings") == render_table()


def stored_table(name: str) -> str:
    """The table of a stored run: medians, and the first server's divided by each other's."""
    report = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
    first, *others = report["servers"]
    lines = [["", *report["servers"]], ["---", *["---:"] * len(report["servers"])]]
    for line in report["lines"]:
        medians, unit = line["medians"], line["row"]["unit"]
        cells = [format_value(medians[first], unit)]
        cells += [f"{format_value(medians[other], unit)} ({medians[first] / medians[other]:.2f}x)" for other in others]
        lines.append([line["row"]["title"], *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |")


@pytest.mark.parametrize("name", ["bench.json", "one-stream.json"])
def test_the_tables_of_figures_are_those_of_the_stored_runs(name: str) -> None:
    assert between(name) == stored_table(name)


def test_no_figure_of_speed_stands_without_a_stored_run() -> None:
    """Whole tables and paragraphs of them came from runs that nobody can look up."""
    prose = re.sub(r"<!-- (\S+\.json) -->.*?<!-- /\1 -->", "", README, flags=re.DOTALL)
    assert re.findall(r"[\d.,]+ (?:ms|us|tok/s|tokens/s|events/s)\b", prose) == []


def test_the_file_map_has_every_module_and_no_other() -> None:
    listing = README.split("### Every module")[1].split("```")[1]
    named, package = [], ""
    for line in listing.strip().splitlines():
        path, meaning = line.split(maxsplit=1)
        assert meaning
        if line.startswith(" "):
            named.append(package + path)
        else:
            package = path
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("server", "engine")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    files = [path for path in named if path.endswith(".py")]
    assert sorted(files) == sorted(modules)
    assert all((ROOT / path).exists() for path in named if path not in files)


def test_no_line_of_the_readme_leads_nowhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test", "lint"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
