"""What the chat page keeps: branches, settings of each chat, answers in the background, files; and what it does not."""

import itertools
import json
import pathlib
import re
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.end_to_end.browser import CHAT, STORED, chunk, say, script, stream, text_answer

STOPPED = {"body": "", "content_type": "text/event-stream"}
"""An answer that breaks off before its first token."""


def ask(page: Page, *texts: str) -> None:
    for text in texts:
        say(page, text)


def button(page: Page, name: str, index: int = 0) -> None:
    page.get_by_role("button", name=name, exact=True).nth(index).click()


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def texts(page: Page) -> list[Any]:
    """Of every chat its title, the path that is shown, and all that is behind it."""
    chats = page.evaluate(STORED)
    return [(c["title"], [m["content"] for m in c["messages"]], sorted(m["content"] for m in c["all"])) for c in chats]


def test_any_message_is_edited_and_what_followed_the_old_one_stays_beside_it(page: Page) -> None:
    bodies = script(page, *(text_answer(f"answer {i}") for i in range(5)))
    ask(page, "one", "two", "three")
    button(page, "Edit message", 1)
    ask(page, "TWO")
    expect(page.locator(".bubble")).to_have_text(["one", "TWO"])
    assert contents(bodies[3]) == ["one", "answer 0", "TWO"]
    switch = page.locator(".user .switch")
    expect(switch).to_have_text("2/2")
    button(page, "Previous version")
    expect(page.locator(".bubble")).to_have_text(["one", "two", "three"])
    button(page, "Regenerate", 0)  # at the first answer, with two turns behind it
    page.wait_for_selector("#send:visible")
    expect(page.locator(".answer .content")).to_have_text(["answer 4"])
    assert contents(bodies[4]) == ["one"]
    page.reload()
    expect(page.locator(".answer .content")).to_have_text(["answer 4"])
    button(page, "Previous version")
    expect(page.locator(".bubble")).to_have_text(["one", "two", "three"])
    button(page, "Next version", 1)
    expect(page.locator(".bubble")).to_have_text(["one", "TWO"])


def test_an_answer_is_edited(page: Page) -> None:
    bodies = script(page, text_answer("wrong"), text_answer("fine"))
    ask(page, "one")
    button(page, "Edit answer")
    expect(page.locator("#editing")).to_contain_text("an answer")
    ask(page, "right")
    expect(page.locator(".answer .content")).to_have_text("right")
    expect(page.locator(".answer .note")).to_contain_text("Edited.")
    ask(page, "two")
    assert contents(bodies[1]) == ["one", "right", "two"]


def test_messages_are_deleted_and_brought_back(page: Page) -> None:
    bodies = script(page, *(text_answer(f"answer {i}") for i in range(5)))
    ask(page, "one", "two", "three")
    button(page, "Delete message", 1)
    expect(page.locator(".bubble")).to_have_text(["one", "three"])
    button(page, "Undo")
    expect(page.locator(".bubble")).to_have_text(["one", "two", "three"])
    button(page, "Delete answer", 1)
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator(".unsent .bubble")).to_have_text("two")
    ask(page, "four")
    assert contents(bodies[3]) == ["one", "answer 0", "three", "answer 2", "four"]
    page.reload()
    expect(page.locator(".bubble")).to_have_text(["one", "two", "three", "four"])
    for _ in range(4):
        button(page, "Delete message")
    expect(page.locator(".card").first).to_be_visible()
    page.wait_for_function(f"async () => (await ({STORED})())[0].messages.length === 0")
    ask(page, "again")
    assert contents(bodies[4]) == ["again"]
    expect(page.locator("#title")).to_have_text("again")


FAILURES: tuple[dict[str, Any], ...] = (
    {"status": 400, "json": {"error": {"message": "too long", "code": "context_length_exceeded"}}},
    {"status": 500, "body": ""},
    STOPPED,
    stream(chunk({"reasoning_content": "Hm"}), done=False),
    stream(chunk({"role": "assistant", "content": ""}), chunk({}, "stop")),
    stream(chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]})),
)


def test_users_and_answers_take_turns_whatever_failed_before(page: Page) -> None:
    """A chat was dead after it if the template wants alternating roles."""
    answers = [(text_answer("fine"), failure, failure, text_answer("now")) for failure in FAILURES]
    bodies = script(page, *itertools.chain.from_iterable(answers))
    for number, failure in enumerate(FAILURES):
        page.click("#new-chat")
        ask(page, "one", "two", "three", "four")
        said = [(message["role"], message["content"]) for message in bodies[4 * number + 3]["messages"]]
        assert said == [("user", "one"), ("assistant", "fine"), ("user", "four")], failure
        expect(page.locator(".unsent .bubble")).to_have_text(["two", "three"])


def test_a_turn_that_waits_is_not_said_to_be_left_out(page: Page) -> None:
    routes: list[Route] = []
    page.route(CHAT, lambda route: routes.append(route))
    page.fill("#input", "one")
    with page.expect_request(CHAT):
        page.press("#input", "Enter")
    expect(page.locator(".answer.live")).to_be_visible()
    expect(page.locator(".unsent")).to_have_count(0)
    call = chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]})
    while not routes:
        page.wait_for_timeout(10)
    routes[0].fulfill(**stream(call, chunk({}, "tool_calls")))
    expect(page.locator(".call textarea")).to_be_visible()
    expect(page.locator(".unsent")).to_have_count(0)


def test_a_call_that_got_no_answer_is_left_out(page: Page) -> None:
    call = chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]})
    asks = stream(call, chunk({}, "tool_calls"))
    bodies = script(page, asks, text_answer("rainy"), asks, {"status": 500, "body": ""}, text_answer("now"))
    ask(page, "one")
    for text in ("rain", "snow"):
        page.fill(".call textarea", text)
        page.click("text=Send result")
        page.wait_for_selector("#send:visible")
        if text == "rain":
            ask(page, "two")
    ask(page, "three")
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert [message["role"] for message in bodies[4]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_message_in_haste_belongs_to_the_chat_that_was_clicked_last(page: Page) -> None:
    """While a chat was still read from storage, a message went to the one before it."""
    bodies = script(page, *[text_answer("fine")] * 4)
    for text in ("first", "second"):
        page.click("#new-chat")
        ask(page, text)
    page.click("#new-chat")
    chats = "[...document.querySelectorAll('.conversations .open')]"
    click = f"name => {chats}.find(chat => chat.textContent.includes(name)).click()"
    send = (
        "() => (document.querySelector('#input').value = 'more', document.querySelector('#composer').requestSubmit())"
    )
    page.evaluate(f"() => {{ ({click})('first'); ({click})('second'); ({send})(); }}")
    expect(page.locator(".bubble")).to_have_text(["second", "more"])
    page.wait_for_selector("#send:visible")
    page.evaluate(f"() => {{ ({click})('first'); document.querySelector('#new-chat').click(); ({send})(); }}")
    expect(page.locator(".bubble")).to_have_text(["more"])
    page.wait_for_selector("#send:visible")
    assert [contents(body) for body in bodies[2:]] == [["second", "fine", "more"], ["more"]]


def test_settings_belong_to_a_chat_and_new_ones_begin_with_the_defaults(page: Page) -> None:
    """After the card with the schema, every new chat answered in JSON."""
    bodies = script(page, *[text_answer("{}")] * 5)
    page.click(".card:has-text('schema')")
    page.wait_for_selector("#send:visible")
    page.fill("[data-setting=system]", "Be brief.")
    page.click("#new-chat")
    expect(page.locator("[data-setting=system]")).to_have_value("")
    page.fill("[data-setting=system]", "Be long.")
    page.reload()  # before anything is said
    expect(page.locator("[data-setting=system]")).to_have_value("Be long.")
    ask(page, "What is 3 plus 4?")
    page.click(".conversations .open:has-text('Mia')")
    ask(page, "more")
    assert "response_format" in bodies[0] and "response_format" not in bodies[1] and "response_format" in bodies[2]
    assert [body["messages"][0]["content"] for body in bodies[1:]] == ["Be long.", "Be brief."]
    page.click("[data-toggle=schema_on]")
    page.click("text=Begin new chats with them")
    page.click("#new-chat")
    expect(page.locator("[data-setting=system]")).to_have_value("Be brief.")
    page.click("#forget-default")
    expect(page.locator("[data-setting=system]")).to_have_value("")
    page.click("summary:text('Presets')")
    page.fill("#preset-name", "pirate")
    page.fill("[data-setting=system]", "Arr.")
    page.click("#keep-preset")
    page.click("#new-chat")
    page.select_option("#presets", "pirate")
    expect(page.locator("[data-setting=system]")).to_have_value("Arr.")


def test_a_template_without_tools_offers_none_and_models_are_chosen(page: Page) -> None:
    def without_tools(route: Route) -> None:
        is_other = "model=other" in route.request.url
        stats = route.fetch(url=route.request.url.split("?")[0]).json()
        route.fulfill(json={**stats, "has_tools": is_other, **({"model": "other"} if is_other else {})})

    def two_models(route: Route) -> None:
        models = route.fetch().json()
        other = {**models["data"][0], "id": "other", "default_sampling_params": {"top_k": 13}}
        names = [*models["models"], {**models["models"][0], "slug": "other"}]
        route.fulfill(json={**models, "data": [*models["data"], other], "models": names})

    page.route(re.compile("/stats"), without_tools)
    page.route("**/v1/models", two_models)
    page.reload()
    expect(page.locator(".card")).to_have_count(5)
    expect(page.locator("#section-tools")).to_be_hidden()
    expect(page.locator("[data-toggle=tools_on]")).to_be_hidden()
    bodies = script(page, *[text_answer("ok")] * 3)
    page.select_option("#models", "other")
    expect(page.locator("#model")).to_have_text("other")
    expect(page.locator("[data-toggle=tools_on]")).to_be_visible()
    expect(page.locator("[data-setting=top_k]")).to_have_attribute("placeholder", "13")
    ask(page, "one")
    page.click("#new-chat")
    expect(page.locator("#model")).to_have_text("weft-demo")
    ask(page, "two")
    page.click(".conversations .open:has-text('one')")
    expect(page.locator("#models")).to_have_value("other")
    ask(page, "three")
    assert [body["model"] for body in bodies] == ["other", "weft-demo", "other"]


def test_arrow_up_recalls_and_keys_open_chats_and_the_sidebar(page: Page) -> None:
    script(page, *[text_answer("ok")] * 2)
    ask(page, "one", "two")
    field = page.locator("#input")
    for key, text in (
        ("ArrowUp", "two"),
        ("ArrowUp", "one"),
        ("ArrowUp", "one"),
        ("ArrowDown", "two"),
        ("ArrowDown", ""),
    ):
        page.keyboard.press(key)
        expect(field).to_have_value(text)
    page.keyboard.type("mine")
    page.keyboard.press("ArrowUp")
    expect(field).to_have_value("mine")
    page.keyboard.press("Control+b")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.reload()
    expect(page.locator("#sidebar")).to_be_hidden()
    page.keyboard.press("Control+b")
    expect(page.locator("#sidebar")).to_be_visible()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".card").first).to_be_visible()
    expect(field).to_be_focused()


def test_titles_follow_edits_but_not_a_given_one(page: Page) -> None:
    script(page, *[text_answer("ok")] * 3)
    ask(page, "frist")
    button(page, "Edit message")
    ask(page, "first")
    expect(page.locator(".conversations .open")).to_have_text("first")
    button(page, "Rename first")
    page.keyboard.type("Mine")
    page.keyboard.press("Enter")
    button(page, "Edit message")
    ask(page, "other")
    expect(page.locator(".conversations .open")).to_have_text("Mine")


def test_chats_are_searched_exported_and_imported(page: Page, tmp_path: pathlib.Path) -> None:
    script(page, *(text_answer(text) for text in ("the moon is far", "apples <b>", "APPLES again")))
    ask(page, "space")
    page.click("#new-chat")
    ask(page, "fruit")
    button(page, "Regenerate")
    page.wait_for_selector("#send:visible")
    page.fill("#search", "moon far")
    expect(page.locator(".conversations .open")).to_have_count(1)
    expect(page.locator(".conversations .place")).to_contain_text("the moon is far")
    page.fill("#search", "nothing such")
    expect(page.locator("#none-found")).to_be_visible()
    page.fill("#search", "")
    page.click("#kept")
    with page.expect_download() as download:
        page.click("#export-json")
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    with page.expect_download() as download:
        page.click("#export-markdown")
    text = pathlib.Path(download.value.path()).read_text()
    assert "# fruit\n\n## You\n\nfruit\n\n## Weft\n\nAPPLES again\n" in text
    before = texts(page)
    for title in ("fruit", "space"):
        page.once("dialog", lambda dialog: dialog.accept())
        page.hover(f".conversations .open:has-text('{title}')")
        button(page, f"Delete {title}")
        expect(page.locator(f".conversations .open:has-text('{title}')")).to_have_count(0)
    page.set_input_files("#import-file", path)
    expect(page.locator("#moved")).to_have_text("2 conversations are imported.")
    assert texts(page) == before
    page.set_input_files("#import-file", path)  # once more changes nothing
    expect(page.locator(".conversations .open")).to_have_count(2)
    hostile = {"title": "<img src=x onerror=alert(1)>", "nodes": [{"id": "a", "parent": "a", "role": "user"}, 7, None]}
    odd = [{"id": "b", "parent": None, "role": "assistant", "content": "<i>x", "calls": "no", "stats": {"first": []}}]
    given = ((hostile, "no conversation"), ({**hostile, "nodes": odd}, "is imported"), ([], "no conversation"))
    for content, told in (*given, ("{", "is not JSON")):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        page.set_input_files("#import-file", path)
        expect(page.locator("#moved")).to_contain_text(told)
    page.click(".conversations .open:has-text('img')")
    expect(page.locator(".answer .content")).to_have_text("<i>x")


ODD = (
    "# Title\n\n## You\n\n# not the next chat",
    "```py\n# a comment\n```\n\\## Weft\n## Weft\n\\\\## Result",
    "*Attached: nothing*\n\n```\nx\n```",
    "Call of `f`:\n\n```json\n{}\n```\n## Result",
    "1. a\n\n   b\n\n## Results",
    "\\# a title  ",
)
"""Messages that read like a part of the file."""


def test_what_is_exported_as_markdown_is_read_again(page: Page, tmp_path: pathlib.Path) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a": "```"}'}}
    asks = stream(chunk({"content": "I look."}), chunk({"tool_calls": [call]}), chunk({}, "tool_calls"))
    script(page, *map(text_answer, ODD), asks, text_answer("rainy"), text_answer("other"))
    files = [{"name": "a.md", "mimeType": "", "buffer": text.encode()} for text in (*ODD, "`````", "")]
    page.set_input_files("#attach-file", files)
    expect(page.locator("#attached .name")).to_have_count(len(files))
    ask(page, *reversed(ODD), "call")
    page.fill(".call textarea", "## You")
    page.click("text=Send result")
    expect(page.locator(".answer .content").last).to_have_text("rainy")
    page.click("#new-chat")
    ask(page, "another")
    page.click("#kept")
    with page.expect_download() as download:
        page.click("#export-markdown")
    text = pathlib.Path(download.value.path()).read_text()
    assert "\n# a comment\n" in text  # what cannot be mistaken is as it was
    (path := tmp_path / "chats.md").write_text(text)
    before = page.evaluate(STORED)
    page.set_input_files("#import-file", path)
    expect(page.locator("#moved")).to_have_text("2 conversations are imported.")
    known = {chat["id"] for chat in before}
    after = [chat for chat in page.evaluate(STORED) if chat["id"] not in known]
    assert sorted(map(said, after), key=str) == sorted(map(said, before), key=str)


def said(chat: dict[str, Any]) -> list[Any]:
    names = ("role", "content", "files")
    said = [{name: message[name] for name in names if message.get(name)} for message in chat["messages"]]
    calls = [call for message in chat["messages"] for call in message.get("calls") or []]
    answered = [
        message["call_id"] in [call["id"] for call in calls] for message in chat["messages"] if "call_id" in message
    ]
    return [chat["title"], said, [(call["name"], call["arguments"]) for call in calls], answered]


FULL = """IDBObjectStore.prototype.put = new Proxy(IDBObjectStore.prototype.put, {
    apply(target, store, values) {
        if (window.isFull) throw new DOMException("Full", "QuotaExceededError");
        return Reflect.apply(target, store, values);
    }
}); window.isFull = true"""


def test_a_full_storage_is_told_and_loses_nothing_while_the_page_is_open(page: Page) -> None:
    """A new chat was lost without a visible word."""
    script(page, *(text_answer(f"answer {i}") for i in range(3)))
    ask(page, "kept")
    page.wait_for_function(f"async () => (await ({STORED})())[0].messages.at(-1).finish === 'stop'")
    page.evaluate(FULL)
    expect(page.locator("#full")).to_be_hidden()
    page.click("#new-chat")
    ask(page, "not kept")
    expect(page.locator("#full")).to_be_visible()
    expect(page.locator(".conversations .state")).to_have_text("not saved")
    page.click(".conversations .open:has-text('kept') >> nth=1")
    page.click(".conversations .open:has-text('not kept')")
    expect(page.locator(".answer .content")).to_have_text("answer 1")
    page.evaluate("window.isFull = false")
    ask(page, "more")
    expect(page.locator("#full")).to_be_hidden()
    page.reload()
    expect(page.locator(".bubble")).to_have_text(["not kept", "more"])


def test_what_was_not_stored_when_the_page_was_closed_is_stored_by_the_next(page: Page) -> None:
    """A question in a new chat was gone if the page was closed before the database had it."""
    script(page, text_answer("fine"))
    page.evaluate(FULL)
    ask(page, "in haste")
    page.on("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.click(".conversations .open:has-text('in haste')")
    expect(page.locator(".answer .content")).to_have_text("fine")


def test_a_closed_page_keeps_what_had_come(page: Page) -> None:
    """Of every answer that ran, also in the background: a database is too slow for a page that is closed."""
    page.evaluate("""() => {
        const bytes = new TextEncoder().encode('data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n');
        window.fetch = new Proxy(fetch, { apply: (target, self, given) => !given[0].includes("chat") ?
            Reflect.apply(target, self, given) :
            new Response(new ReadableStream({ start: stream => stream.enqueue(bytes) })) });
    }""")
    for text in ("one", "two"):
        page.click("#new-chat")
        page.fill("#input", text)
        page.press("#input", "Enter")
        expect(page.locator(".answer .content")).to_have_text("half")
    page.goto("about:blank")
    page.go_back()
    for text in ("one", "two"):
        page.click(f".conversations .open:has-text('{text}')")
        expect(page.locator(".answer .content")).to_have_text("half")
        expect(page.locator(".answer .note")).to_contain_text("Interrupted")
        expect(page.get_by_role("button", name="Continue")).to_be_visible()
    assert page.evaluate("Object.keys(localStorage).filter(name => name.includes('rescued'))") == []


def test_five_hundred_chats_are_listed_at_once(page: Page) -> None:
    page.evaluate("""async () => {
        const { transact } = await import("/chat_page/db.js");
        await transact("readwrite", async handle => {
            for (let i = 0; i < 500; i++) {
                const chat = `c${i}`;
                const meta = { title: `chat ${i}`, titled: 1, time: i, settings: {}, settled: 0 };
                await handle.putChat({ id: chat, ...meta });
                for (let j = 0; j < 6; j++) {
                    const parent = j ? `${chat}.${j - 1}` : null;
                    const place = { id: `${chat}.${j}`, chat, parent, born: j, changed: j };
                    const said = { role: j % 2 ? "assistant" : "user", content: "word ".repeat(200) };
                    await handle.putMessage({ ...place, ...said, stats: {}, calls: [] });
                }
            }
        });
    }""")
    page.reload()
    expect(page.locator(".conversations li")).to_have_count(500)
    page.fill("#search", "chat 499")
    expect(page.locator(".conversations li")).to_have_count(1)


def test_a_hidden_answer_that_ends_is_marked_until_it_is_seen(page: Page) -> None:
    routes: list[Route] = []
    page.route(CHAT, lambda route: routes.append(route))
    page.fill("#input", "slow")
    with page.expect_request(CHAT):
        page.press("#input", "Enter")
    page.click("#new-chat")
    expect(page.locator(".conversations .state")).to_have_text("answering")
    while not routes:
        page.wait_for_timeout(10)
    routes[0].fulfill(**text_answer("done"))
    expect(page.locator(".conversations .state")).to_have_text("new answer")
    page.click(".conversations .open")
    expect(page.locator(".answer .content")).to_have_text("done")
    expect(page.locator(".conversations .state")).to_have_count(0)
