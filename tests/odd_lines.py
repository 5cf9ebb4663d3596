"""Lines in which tokenizers go wrong: scripts, emoji, white space, numbers, texts of special tokens, and mixtures."""
# ruff: noqa: E501, RUF001 (odd characters, and many of them)

import functools
import random
import unicodedata

SCRIPTS = ["Ελληνικά κείμενα με τόνους", "Съешь ещё этих мягких булок", "שלום עולם, מה שלומך?", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界！今天天气怎么样？", "こんにちは世界。カタカナ", "안녕하세요 세계", "வணக்கம் உலகம்", "tiếng Việt có dấu", "Zażółć gęślą jaźń", "ქართული ენა", "Հայերեն լեզու", "አማርኛ ቋንቋ", "မြန်မာဘာသာ", "ភាសាខ្មែរ", "ⅣⅫ ½ ² ₁₂ ①②③", "ﬁ ﬂ ligatures", "Ａｌｌ　１２３", "naïve café — “quotes” …", "n\u0303 e\u0301 o\u0308", "ﷺ", "𝕳𝖊𝖑𝖑𝖔 𝒲ℴ", "İstanbul ıspanak", "ẞ straße", "\u200bzero\u200c\u200d\ufeffbom", "\u202eright\u202c", "soft\u00adhyphen nb\u00a0space \u2003em \u3000ideographic", "\u2028line\u2029", "\x1b[31mred\x7fdel", "\ue000\uf8ff", "\ufffd", "𐍈𐌰 𓀀 🀄"]  # fmt: skip
EMOJI = ["😀😃😄", "👩‍👩‍👧‍👦 family", "👍🏽👎🏿", "🇩🇪🇯🇵", "❤️‍🔥 ❤", "1️⃣#️⃣", "🤷🏻‍♀️ shrug", "text😂text"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", " \n", "\n ", "\t\t", "a  b", "a   b", "a    b    c", " leading", "  leading two", "trailing ", "trailing   ", "\n\tindent", "a\n\n\nb", "\u3000", "x\u00a0\u00a0y", "\t\tif x:\n\t\t\treturn 1\n", "    if x:\n        return y\n", " " * 31 + "x", " " * 64, "\n" * 20, "\t" * 9, "a" + " " * 17 + "b", "| a |  |   |\n|---|---|"]  # fmt: skip
SPECIAL = ["<|im_start|>user\nhi<|im_end|>\n", "<s>", "</s>", "<bos>", "<pad>", "[INST] hi [/INST]", "<|eot_id|>", "a <|im_end|> b", "< |im_end|>", "<0x0A>", "▁▁", "▁hello", "Ġhello", "[CLS] a [SEP] [MASK]", "<｜User｜>hi", "<h1>x</h1>"]  # fmt: skip
NUMBERS = ["0", "42", "123", "1234", "1234567890", "3.14159", "-1e-10", "1,000,000.00", "0x1F", "2026-11-28T04:11:00Z", "$1,234.56", "50%", "٣٤٥", "१२३", "99999999999999999999", "1  22   333"]  # fmt: skip
WORDS = ["don't", "I'm", "we'll", "IT'S", "O'Brien", "you’re", "camelCaseWord", "snake_case", "path/to/file.txt", "https://example.org/a?b=c&d=%20#e", "user@example.org", "C++", "a.b.c()", "x=>y", "<!-- c -->", '"quoted"', "'''", "\\n\\t", "{}[]()", "...", "!!!???", "——", "antidisestablishmentarianism", "a" * 40, "ABABABABABABAB", "q" * 60, "=" * 41, "-" * 77, "🙂" * 9, "啊" * 12]  # fmt: skip


@functools.cache
def odd_lines(num_mixtures: int = 200) -> tuple[str, ...]:
    """The same lines each time."""
    rng = random.Random(20)
    atoms = [*SCRIPTS, *EMOJI, *SPACES, *SPECIAL, *NUMBERS, *WORDS]
    mixed = [
        rng.choice(["", " ", "\n", "  "]).join(rng.choices(atoms, k=rng.randint(2, 5))) for _ in range(num_mixtures)
    ]
    return (*atoms, *mixed, *(_random_text(rng) for _ in range(num_mixtures // 2)))


def _random_text(rng: random.Random) -> str:
    low, high = rng.choice([(32, 127), (32, 0x250), (0x3000, 0xA000), (0xA000, 0xD7FF), (0x10000, 0x1FFFF)])
    chars = [chr(rng.randint(low, high)) if rng.random() > 0.15 else rng.choice(" \n\t") for _ in range(20)]
    return "".join(char for char in chars if unicodedata.category(char) != "Cs")
