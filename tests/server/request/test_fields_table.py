from weft.server.request.fields import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from weft.server.request.fields_table import REMARKS, render_table, treatments
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.schemas.completions import CompletionBody


def test_every_field_of_both_routes_has_a_row() -> None:
    rows = [line.split(" | ")[0].strip("| `") for line in render_table().splitlines()[2:]]
    fields = {*ChatCompletionBody.model_fields, *CompletionBody.model_fields, *REFUSED_IN_CHAT, *REFUSED_IN_COMPLETIONS}
    assert sorted(rows) == sorted(fields)
    assert all(line.count("|") == 5 for line in render_table().splitlines())


def test_a_row_says_what_the_code_does() -> None:
    lines = render_table().splitlines()
    assert "| `temperature` | honoured | honoured | 0 is greedy |" in lines
    assert any(line.startswith("| `echo` | refused | honoured |") for line in lines)
    assert any(line.startswith("| `messages` | honoured |  |") for line in lines)
    assert any(line.startswith("| `user` | accepted | accepted |") for line in lines)


def test_a_field_that_moves_is_told_from_the_code() -> None:
    assert treatments(ChatCompletionBody, {"made_up": (None,)})["made_up"] == "refused"
    assert treatments(ChatCompletionBody, {"stop": (None,)})["stop"] == "honoured", "declared in the schema, so used"


def test_remarks_are_about_fields_that_there_are() -> None:
    assert REMARKS.keys() <= {*ChatCompletionBody.model_fields, *CompletionBody.model_fields}
