from docs.parameters import REMARKS, ROUTES, render_table, treatments
from weft.server.task.bodies import ChatCompletionBody


def test_every_field_of_every_route_has_a_row() -> None:
    rows = [line.split(" | ")[0].strip("| `") for line in render_table().splitlines()[2:]]
    fields = {name for _, body, refused in ROUTES for name in (*body.model_fields, *refused) if "." not in name}
    assert sorted(rows) == sorted(fields)
    assert all(line.count("|") == len(ROUTES) + 3 for line in render_table().splitlines())


def test_a_row_says_what_the_code_does() -> None:
    lines = render_table().splitlines()
    assert any(line.startswith("| `temperature` | honoured | honoured |") for line in lines)
    assert any(line.startswith("| `echo` | refused | honoured |") for line in lines)
    assert any(line.startswith("| `messages` | honoured |  | refused |") for line in lines)
    assert any(line.startswith("| `user` | accepted | accepted |") for line in lines)


def test_a_field_that_moves_is_told_from_the_code() -> None:
    assert treatments(ChatCompletionBody, {"made_up": (None,)})["made_up"] == "refused"
    assert treatments(ChatCompletionBody, {"stop": (None,)})["stop"] == "refused", "even though declared"


def test_remarks_are_about_fields_that_there_are() -> None:
    assert REMARKS.keys() <= {name for _, body, _ in ROUTES for name in body.model_fields}
