from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.server.apis.openai.completions import echo_prompt
from weft.server.task.task import Prompt


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), st.booleans())
def test_each_token_begins_where_its_text_does(site: Any, text: str, add_special_tokens: bool) -> None:
    tokenizer = site.tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens)
    echo = echo_prompt(Prompt(token_ids, text), tokenizer, skip_special_tokens=True)
    assert echo.text == text
    expected = [0] * add_special_tokens + [i for i, char in enumerate(text) for _ in char.encode()]
    assert echo.starts == expected


def test_token_ids_are_shown_as_the_caller_wants_them(site: Any) -> None:
    prompt = Prompt([97, 257, 98])
    assert echo_prompt(prompt, site.tokenizer, skip_special_tokens=True).text == "ab"
    shown = echo_prompt(prompt, site.tokenizer, skip_special_tokens=False)
    assert (shown.text, shown.starts) == ("a<257>b", [0, 1, 6])
