"""About 2,000 odd lines for tokenizers, the same each time: English, code, scripts, emoji, white space, mixtures.

`odd_texts.json` has short ones in groups, among them texts of special tokens. Nothing depends on files that change, so
that what another program makes of the lines can be stored.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
_SEED = 20
_PLANES = (
    (0x20, 0x7F),
    (0x20, 0x250),
    (0x250, 0x1000),
    (0x1000, 0x3000),
    (0x3000, 0xA000),
    (0xA000, 0xD7FF),
    (0xE000, 0xFFFD),
    (0x1_0000, 0x1_FFFF),
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABC'-_.,"


def odd_lines() -> list[str]:
    """All of them; none is empty, some hold several lines."""
    rng = random.Random(_SEED)
    groups = json.loads((HERE / "odd_texts.json").read_text(encoding="utf-8"))
    texts = [text for group in groups.values() for text in group]
    lines = [*_written(), *texts]
    lines += (rng.choice(["", " ", "\n", "  "]).join(rng.choices(texts, k=rng.randint(2, 5))) for _ in range(700))
    lines += (_characters(rng) for _ in range(350))
    lines += (_words(rng) for _ in range(350))
    return [line for line in lines if line]


def _written() -> list[str]:
    """English, code, German, French, Spanish: lines, and some that belong together."""
    files = (HERE / "text.md", HERE.parents[1] / "LICENSE")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return lines + ["\n".join(lines[start : start + 4]) for start in range(0, len(lines), 2)]


def _characters(rng: random.Random) -> str:
    low, high = rng.choice(_PLANES)
    number = rng.randint(1, 40)
    return "".join(chr(rng.randint(low, high)) if rng.random() > 0.15 else rng.choice(" \n\t") for _ in range(number))


def _words(rng: random.Random) -> str:
    words = ("".join(rng.choices(_LETTERS, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 12)))
    return rng.choice(["", " ", "  "]).join(words)
