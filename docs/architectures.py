"""What docs/models.md says of every causal architecture of transformers: the stored results of the tests, grouped."""

import json
from collections import Counter
from pathlib import Path

_TITLES = {
    "native": "served by Weft's own layers",
    "transformers": "served through transformers' module",
    "refused": "refused",
    "no decoder": "no decoder",
    "cannot be built": "not tested",
}


def render_architectures(path: Path) -> str:
    """A sentence of totals, then a line for each outcome and reason with the model types that have it."""
    total, groups = _summary(path)
    rows = (f"| {title} | {', '.join(names)} |" for title, names in groups.items())
    return "\n".join([total, "", "| outcome | model types |", "|---|---|", *rows]) + "\n"


def render_data(path: Path) -> str:
    """The same as JSON, which `weft models --architectures` prints."""
    total, groups = _summary(path)
    return json.dumps({"total": total, "groups": groups}, indent=1) + "\n"


def _summary(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The sentence of totals, and the model types by what is said of them."""
    table = json.loads(path.read_text(encoding="utf-8"))
    groups: dict[tuple[str, str], list[str]] = {}
    for name, entry in table["entries"].items():
        groups.setdefault((entry["outcome"], _reason(entry)), []).append(name)
    counts = Counter(entry["outcome"] for entry in table["entries"].values())
    total = ", ".join(f"{counts[outcome]} {title}" for outcome, title in _TITLES.items() if counts[outcome])
    order = sorted(groups, key=lambda group: (list(_TITLES).index(group[0]), group[1]))
    titles = {key: f"{_TITLES[key[0]]}: {key[1]}" if key[1] else _TITLES[key[0]] for key in order}
    sentence = f"Of {len(table['entries'])} model types in transformers {table['transformers']}: {total}."
    return sentence, {titles[key]: groups[key] for key in order}


def _reason(entry: dict[str, str]) -> str:
    """Why, without the name of the architecture; empty where the title says all."""
    if entry["outcome"] in ("native", "transformers"):
        return "" if entry["detail"] == "prefix cache" else entry["detail"]
    _, separator, reason = entry["detail"].partition(" is not supported: ")
    named = entry["detail"].endswith(" is not supported")
    return reason if separator else "" if named else entry["detail"]
