"""What goes along with a message, what an answer came of, answers side by side, edited calls, and a full context."""

import json
import pathlib
import re
import zlib
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.end_to_end.browser import chunk, say, script, stream, text_answer


def test_files_go_in_front_of_the_words(page: Page, tmp_path: pathlib.Path) -> None:
    bodies = script(page, text_answer("one"), text_answer("two"), text_answer("three"))
    names = {"a.py": b"print('```')\n", "b.txt": "naïve".encode(), "c.bin": b"\0\1", "d.txt": b"\xff", "e.pdf": b"%PDF"}
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    page.set_input_files("#attach-file", [tmp_path / name for name in names])
    expect(page.locator("#attached .name")).to_have_text(["a.py", "b.txt"])
    expect(page.locator("#attached .file").first).to_contain_text("tokens")
    expect(page.locator("#attach-fault")).to_contain_text("c.bin is no text in UTF-8. d.txt is no text")
    expect(page.locator("#attach-fault")).to_contain_text("e.pdf cannot be read: it is damaged, or no PDF.")
    expect(page.locator("#measured")).to_contain_text("tokens")  # with the files, before anything is sent
    page.reload()  # with the files, which are not sent yet
    expect(page.locator("#attached .name")).to_have_text(["a.py", "b.txt"])
    say(page, "Look at these")
    sent = "a.py:\n````\nprint('```')\n\n````\n\nb.txt:\n```\nnaïve\n```\n\nLook at these"
    assert bodies[0]["messages"] == [{"role": "user", "content": sent}]
    expect(page.locator("#attached .file")).to_have_count(0)
    page.reload()
    expect(page.locator(".user details.file")).to_have_count(2)
    page.click("details.file summary >> nth=0")
    expect(page.locator("details.file pre").first).to_contain_text("print")
    page.get_by_role("button", name="Edit message").click()
    expect(page.locator("#attached .name")).to_have_text(["a.py", "b.txt"])
    page.reload()  # which is no new message
    expect(page.locator(".user details.file")).to_have_count(2)
    expect(page.locator("#attached .file")).to_have_count(0)
    page.get_by_role("button", name="Edit message").click()
    page.get_by_role("button", name="Remove a.py").click()
    say(page, "Only this")
    assert bodies[1]["messages"][0]["content"] == "b.txt:\n```\nnaïve\n```\n\nOnly this"
    page.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File(["dropped"], "f.md"));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }""")
    expect(page.locator("#attached .name")).to_have_text("f.md")
    page.focus("#input")
    page.keyboard.press("Enter")  # without a word
    expect(page.locator(".answer .content").last).to_have_text("three")
    assert bodies[2]["messages"][-1]["content"] == "f.md:\n```\ndropped\n```"


def pdf(*pages: bytes) -> bytes:
    """A PDF with these contents of pages, packed."""
    contents = [zlib.compress(page) for page in pages]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for index, data in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents %d 0 R"
            b" /Resources << /Font << /F 3 0 R >> >> >>" % (5 + 2 * index)
        )
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(data), data))
    file, offsets = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(file))
    return file + b"xref\n0 %d\n0000000000 65535 f \n%b%b" % (size, table, end)


def test_the_text_of_a_pdf_goes_along_and_others_are_told(page: Page) -> None:
    bodies = script(page, text_answer("one"))
    first = b"BT /F 12 Tf 20 250 Td (Weft na\\357ve) Tj 0 -14 Td (second line) Tj ET"
    second = b"BT /F 12 Tf 20 250 Td [(pa) -20 (ge two)] TJ ET"
    given = {"good.pdf": pdf(first, second), "scan.pdf": pdf(b"0 0 100 100 re f"), "cut.pdf": pdf(first)[:300]}
    kind = "application/pdf"
    files = [{"name": name, "mimeType": kind, "buffer": data} for name, data in given.items()]
    page.set_input_files("#attach-file", files)
    expect(page.locator("#attach-fault")).to_contain_text("scan.pdf cannot be read: it holds no text; is it a scan?")
    expect(page.locator("#attach-fault")).to_contain_text("cut.pdf cannot be read: it is damaged, or no PDF.")
    expect(page.locator("#attached .name")).to_have_text("good.pdf")
    expect(page.locator("#attached .file")).to_contain_text("tokens")
    say(page, "Read this")
    sent = "good.pdf:\n```\nWeft naïve\nsecond line\n\npage two\n```\n\nRead this"
    assert bodies[0]["messages"] == [{"role": "user", "content": sent}]


def test_answers_of_two_settings_stand_side_by_side_with_their_parameters(page: Page) -> None:
    bodies = script(page, text_answer("cold"), text_answer("hot"), text_answer("next"))
    page.click("text=Sampling")
    for value in ("0", "1.5"):
        page.fill("[data-setting=temperature]", value)
        if value == "0":
            say(page, "Well?")
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("#send:visible")
    page.get_by_role("button", name="Side by side").click()
    columns = page.locator(".compare > div")
    expect(columns.locator(".content")).to_have_text(["cold", "hot"])
    for index, value in enumerate(("0", "1.5")):
        columns.nth(index).locator(".asked summary").click()
        expect(columns.nth(index).locator(".asked p")).to_contain_text(f"model weft-demo · temperature {value}")
    page.click("text=Go on with this one")
    expect(page.locator(".compare .chosen .content")).to_have_text("cold")
    page.get_by_role("button", name="Side by side").first.click()
    expect(page.locator(".answer .content")).to_have_text(["cold"])
    say(page, "Next")
    assert [message["content"] for message in bodies[2]["messages"]] == ["Well?", "cold", "Next"]


def test_arguments_of_a_call_are_edited_before_it_is_answered(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"city":"Oslo"}'}}
    bodies = script(page, stream(chunk({"tool_calls": [call]}), chunk({}, "tool_calls")), text_answer("fine"))
    say(page, "Well?")
    page.get_by_role("button", name="Edit the arguments of f").click()
    field = page.get_by_label("Arguments of f")
    expect(field).to_be_focused()
    assert json.loads(field.input_value()) == {"city": "Oslo"}
    page.fill("[name='result c1']", "rain")
    field.fill('{"city": ')
    page.click("text=Send result")
    assert len(bodies) == 1
    field.fill('{"city": "Rome"}')
    page.click("text=Send result")
    expect(page.locator(".answer .content").last).to_have_text("fine")
    _, asked, result = bodies[1]["messages"]
    assert (asked["tool_calls"][0]["function"]["arguments"], result["content"]) == ('{"city": "Rome"}', "rain")
    expect(page.locator(".call pre")).to_contain_text("Rome")


# --- a full context is no dead end ------------------------------------------------------------------------------------

SIZE = 50


@pytest.fixture
def small(page: Page) -> Page:
    """The page of a model with a context of `SIZE` tokens."""

    def shrink(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "max_model_len": SIZE})

    page.route("**/stats", shrink)
    page.reload()
    expect(page.locator("#dot.good")).to_be_visible()
    return page


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_the_oldest_turns_are_left_out_and_sent_again(small: Page) -> None:
    bodies = script(small, *(text_answer(f"answer {i}") for i in range(5)))
    for text in ("one", "two", "three"):
        say(small, text)
    expect(small.locator("#measured")).to_have_text(re.compile(rf"\d+ of {SIZE} tokens"))
    notice = small.locator("#context")
    expect(notice).to_be_visible()
    small.click("text=Leave out the oldest turns")
    expect(small.locator(".cut")).to_contain_text("left out")
    expect(notice).to_be_hidden()
    expect(small.locator(".bubble")).to_have_text(["one", "two", "three"])  # still there
    expect(small.locator(".unsent")).not_to_have_count(0)
    small.reload()
    say(small, "four")
    assert contents(bodies[3])[-1] == "four" and "one" not in contents(bodies[3])
    small.click("text=Send it again")
    expect(small.locator(".cut")).to_have_count(0)
    say(small, "five")
    assert contents(bodies[4])[::2] == ["one", "two", "three", "four", "five"]


def test_the_oldest_turns_are_summarised(small: Page) -> None:
    texts = ("answer 0", "answer 1", "It was about numbers.", "answer 3")
    bodies = script(small, *map(text_answer, texts))
    say(small, "one " * 20)
    say(small, "two")
    small.click("text=Summarise them")
    expect(small.locator(".cut")).to_contain_text("It was about numbers.")
    (asked,) = contents(bodies[2])
    assert re.match(r"Summarise .*\n\n.*assistant: answer 0", asked, re.DOTALL)
    assert len(asked) < 300  # what is summarised has to fit, too
    say(small, "three")
    assert [message["role"] for message in bodies[3]["messages"]][-1] == "user"
    assert contents(bodies[3])[0].startswith("Summary of what was said before:\nIt was about numbers.\n\n")
    assert not any("one one" in content for content in contents(bodies[3]))


def test_a_message_that_is_too_long_is_told_before_it_is_sent(small: Page) -> None:
    small.fill("#input", "word " * 200)
    notice = small.locator("#context")
    expect(notice).to_contain_text("does not fit into the context. Shorten the message.")
    small.fill("#input", "word")
    expect(notice).to_be_hidden()
    expect(small.locator("#measure")).to_be_visible()
    small.fill("#input", "")
    expect(small.locator("#measure")).to_be_hidden()


def test_a_text_that_is_not_even_counted_is_told_as_well(page: Page) -> None:
    """The server counts four times its context, and refuses the rest."""
    refusal = {"error": {"message": "messages must have at most 65536 tokens", "code": "invalid_value"}}
    page.route("**/tokenize", lambda route: route.fulfill(status=400, json=refusal))
    page.fill("#input", "word")
    expect(page.locator("#context")).to_contain_text("messages must have at most 65536 tokens")
    expect(page.locator("#measured")).to_have_text("more than 98,304 tokens")
