"""The chat page against a live server: what somebody does with it, in a real browser."""

import json
import os
import re
import signal
import time
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.end_to_end.browser import CHAT, Open, pages, say, script, text_answer
from tests.end_to_end.conftest import ENGINE, LiveServer, Serve
from tests.server.mcp_servers import new_server
from tests.server.mcp_servers import serve as serve_mcp

LONG = '{"type": "string", "minLength": 1000000}'
"""An answer that follows this schema fills the context of the model, however fast that is: it runs until it is stopped.
"""

WEATHER = """{"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}"""


SLOWLY = """() => {
    const read = ReadableStreamDefaultReader.prototype.read;
    let rest = 8000;
    ReadableStreamDefaultReader.prototype.read = async function () {
        const { done, value } = await read.call(this);
        if (!rest) return new Promise(() => {});
        const part = value?.slice(0, rest);
        rest -= part?.length ?? 0;
        return { done, value: part };
    };
}"""
"""Of a stream, the page reads the beginning only, however fast the model is."""


def ask_for_something_long(page: Page) -> None:
    page.click("text=JSON schema >> nth=0")
    page.fill("[data-setting=schema]", LONG)
    page.fill("#input", "Go on for long")
    page.press("#input", "Enter")


def test_a_message_is_answered_and_kept_over_a_reload(page: Page) -> None:
    page.keyboard.type("Hello")  # the field has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:visible")
    expect(page.locator(".answer .content")).not_to_be_empty()
    note = page.locator(".answer .note")
    expect(note).to_contain_text("to first token")
    expect(note).to_contain_text(re.compile(r"\d tokens.*prompt \d"))
    answer = page.inner_text(".answer .content")
    expect(page.locator("#input")).to_have_value("")
    page.fill("#input", "not sent yet")
    page.reload()
    assert page.inner_text(".bubble") == "Hello"
    assert page.inner_text(".answer .content") == answer
    expect(page.locator("#input")).to_have_value("not sent yet")
    expect(page.locator(".conversations .current")).to_contain_text("Hello")


SEEN = """() => {
    const ids = ["pill-text", "num-running", "num-used", "rate", "decode"];
    window.seen = [];
    new MutationObserver(() => {
        const note = document.querySelector(".answer.live .note")?.textContent;
        const length = document.querySelector(".answer.live pre")?.textContent.length;
        const texts = ids.map(id => [id, document.getElementById(id).textContent]);
        seen.push({ note, length, ...Object.fromEntries(texts) });
    }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""
"""Takes note of whatever is shown, so that a test need not look at the right moment."""


def test_an_answer_streams_beside_a_picture_of_the_engine(page: Page, live_server: LiveServer) -> None:
    page.evaluate(SEEN)
    ask_for_something_long(page)
    page.wait_for_function("""() => [
        shown => shown["pill-text"] === "1 running" && shown["num-running"] === "1" && +shown["num-used"] > 0,
        shown => +shown.rate > 0,
        shown => +shown.decode > 0,
        shown => /to first token.*\\d tokens.s/.test(shown.note),
    ].every(claim => seen.some(claim)) && new Set(seen.map(shown => shown.length)).size > 5""")
    assert "in use" in str(page.get_attribute("#cloth", "aria-label"))
    page.click(".conversations .open")  # the open one goes on
    page.click("#stop")
    live_server.wait_for_metric("weft:num_requests_running", 0)


def test_an_answer_stops(page: Page, live_server: LiveServer) -> None:
    ask_for_something_long(page)
    content = page.locator(".answer pre")
    expect(content).to_have_text(re.compile(r".{20}"))
    first = content.inner_text()
    page.click("#stop")
    expect(page.locator(".answer .note")).to_contain_text("Stopped.")
    live_server.wait_for_metric("weft:num_requests_running", 0)
    assert page.inner_text(".answer pre").startswith(first[:20])
    expect(page.locator(".badge")).to_contain_text("incomplete")
    ask_again = page.get_by_role("button", name="Regenerate")
    ask_again.click()
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".answer .note")).to_contain_text("Stopped.")
    assert page.locator(".answer").count() == 1
    expect(page.locator("#input")).to_be_focused()
    live_server.wait_for_metric("weft:num_requests_running", 0)


def test_an_answer_that_a_reload_cut_goes_on_at_one_click(page: Page, live_server: LiveServer) -> None:
    page.click("text=Sampling")
    page.fill("[data-setting=temperature]", "0")
    say(page, "Tell me a story about Mia and a fox")
    content, note = page.locator(".answer .content"), page.locator(".answer .note")
    whole = content.inner_text()
    page.evaluate(SLOWLY)
    page.get_by_role("button", name="Regenerate").click()
    expect(content).to_have_text(re.compile(r"^.{10}"))
    page.reload()
    expect(note).to_contain_text("Interrupted: the page was closed.")
    live_server.wait_for_metric("weft:num_requests_running", 0)
    begun = content.inner_text()
    assert whole.startswith(begun) and len(begun) < len(whole)
    with page.expect_request(CHAT) as asked:
        page.get_by_role("button", name="Continue").click()
    page.wait_for_selector("#send:visible")
    assert asked.value.post_data_json["continue_final_message"] is True
    expect(content).to_have_text(whole)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    expect(page.locator(".answer .switch")).to_have_text("2/2")  # no third
    page.reload()
    expect(content).to_have_text(whole)


def test_an_answer_in_the_background_goes_on_by_itself_after_a_reload(page: Page, live_server: LiveServer) -> None:
    page.click("text=Sampling")
    page.fill("[data-setting=temperature]", "0")
    say(page, "Tell me a story about Mia and a fox")
    content, note = page.locator(".answer .content"), page.locator(".answer .note")
    whole = content.inner_text()
    page.get_by_label("Go on when the page is closed").check()
    page.evaluate(SLOWLY)
    page.get_by_role("button", name="Regenerate").click()
    expect(content).to_have_text(re.compile(r"^.{10}"))
    begun = content.inner_text()
    assert whole.startswith(begun) and len(begun) < len(whole)
    with page.expect_response(re.compile("/v1/responses/.*starting_after=")) as read_on:
        page.reload()
    response = read_on.value.url.split("?")[0]
    expect(content).to_have_text(whole)
    page.wait_for_selector("#send:visible")
    expect(note).to_contain_text("tokens")
    expect(page.locator(".answer .switch")).to_have_text("2/2")
    page.wait_for_function(
        "async url => (await fetch(url)).status === 404", arg=response
    )  # the server has forgotten it
    ask_for_something_long(page)
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{20}"))
    page.keyboard.press("Escape")
    expect(note.last).to_contain_text("Stopped.")
    live_server.wait_for_metric("weft:num_requests_running", 0)  # not only this page has left


def test_what_follows_a_schema_cannot_go_on(page: Page, live_server: LiveServer) -> None:
    """The schema would begin anew."""
    ask_for_something_long(page)
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{20}"))
    first = page.inner_text(".answer pre")
    page.reload()
    assert page.inner_text(".answer pre").startswith(first)
    expect(page.locator(".answer .note")).to_contain_text("Interrupted: the page was closed.")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    live_server.wait_for_metric("weft:num_requests_running", 0)


def test_an_answer_goes_on_beside_another_conversation(page: Page, live_server: LiveServer) -> None:
    ask_for_something_long(page)
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{20}"))
    first = page.inner_text(".answer pre")
    page.click("#new-chat")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator(".conversations .state")).to_have_text("answering")
    say(page, "Hello")
    expect(page.locator(".answer .note")).to_contain_text("to first token")
    expect(page.locator(".conversations .answering")).to_have_count(1)
    page.click(".conversations .open:has-text('Go on')")
    expect(page.locator("#stop")).to_be_visible()
    assert len(page.inner_text(".answer pre")) > len(first)
    page.click("#stop")
    expect(page.locator(".answer .note")).to_contain_text("Stopped.")
    assert page.inner_text(".answer pre").startswith(first)
    live_server.wait_for_metric("weft:num_requests_running", 0)


def test_a_key_is_asked_for_and_sent_and_servers_of_the_operator_are_used(open_page: Open, serve: Serve) -> None:
    server = new_server("weather")

    @server.tool()
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}"

    with serve_mcp(server.streamable_http_app()) as url:
        live = serve("--api-key", "sécret", "--dtype", "float32", WEFT_MCP_SERVERS=f"weather={url},gone={url[:-4]}/no")
        page = open_page(live.base_url)
        check_the_key(page)
        check_the_servers(page)


def check_the_servers(page: Page) -> None:
    page.click("#new-chat")
    page.click("[data-toggle=tools_on]")  # opens the section, as there is nothing to call yet
    expect(page.locator("#tools-fault")).to_contain_text("missing")
    page.get_by_label("weather", exact=True).check()
    page.get_by_label("gone").check()
    expect(page.locator("#tools-fault")).to_be_empty()
    page.click("text=Sampling")
    page.fill("[data-setting=temperature]", "0")
    say(page, "What is the weather in Oslo?")
    hosted = page.locator(".hosted details")
    expect(hosted.locator("summary")).to_have_text(["No tools gone", re.compile("get_weather weather")])
    page.click(".hosted summary:has-text('get_weather')")
    expect(hosted.last).to_contain_text("sunny in Oslo")
    expect(page.locator(".answer .content")).not_to_be_empty()
    expect(page.locator(".answer .note")).to_contain_text("tokens")
    page.reload()
    expect(page.get_by_label("weather", exact=True)).to_be_checked()
    expect(hosted.last).to_contain_text("sunny in Oslo")
    say(page, "Thanks")
    expect(page.locator(".answer .content").last).not_to_be_empty()
    page.click("#section-tools > summary")
    page.get_by_label("weather", exact=True).uncheck()
    page.get_by_label("gone").uncheck()
    expect(page.locator("#tools-fault")).to_contain_text("missing")
    expect(page.locator(".error:visible")).to_have_count(0)


def check_the_key(page: Page) -> None:
    dialog = page.locator("dialog")
    expect(dialog).to_be_visible()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-reason")).to_contain_text("not valid")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.fill("#input", "Hello")
    page.keyboard.press("Enter")  # refused with 401, so the page asks once more, and goes on
    expect(dialog).to_be_visible()
    expect(page.locator(".bubble")).to_have_text("Hello")
    page.fill("#key", "sécret")
    page.click("text=Use this key")
    expect(page.locator(".answer .note")).to_contain_text("tokens")
    expect(page.locator("#pill-text")).to_have_text("idle")
    assert page.evaluate("[localStorage, sessionStorage].map(s => s.getItem('weft:key'))") == [None, "sécret"]
    page.click("#change-key")
    page.check("#keep-key")
    page.keyboard.press("Enter")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#pill-text")).to_have_text("idle")
    expect(other.locator("dialog")).to_be_hidden()
    other.click("#change-key")
    other.fill("#key", "")  # which removes it
    other.keyboard.press("Enter")
    expect(other.locator("#key-reason")).to_contain_text("API key")
    assert other.evaluate("[localStorage, sessionStorage].map(s => s.getItem('weft:key'))") == [None, None]
    other.close()
    page.fill("#key", "sécret")  # it is gone in this tab as well
    page.keyboard.press("Enter")
    expect(page.locator("#pill-text")).to_have_text("idle")


def test_a_tool_is_called_and_answered(page: Page) -> None:
    bodies: list[Any] = []

    def ask_for_one_call(route: Route) -> None:
        """A model that has not learned to call goes on calling."""
        bodies.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps(bodies[-1] | {"parallel_tool_calls": False}))

    page.route(CHAT, ask_for_one_call)
    page.click("text=Tools >> nth=0")
    page.fill("[data-setting=tools]", WEATHER)
    page.select_option("[data-setting=tool_choice]", "required")
    say(page, "What is the weather in Oslo?")
    call = page.locator(".call")
    expect(call).to_contain_text("get_weather")
    expect(call.locator("pre")).to_contain_text('"city": "')
    page.fill(".call textarea", "rain, 4 degrees")
    page.click("text=Sampling")
    page.fill("[data-setting=max_tokens]", "20")
    page.click("text=Send result")
    expect(page.locator(".answer").nth(1)).to_be_visible()
    page.wait_for_selector("#send:visible")
    expect(page.locator(".error:visible")).to_have_count(0)
    expect(call).to_contain_text("rain, 4 degrees")
    assert [body["tool_choice"] for body in bodies] == ["required", "auto"]
    assistant, tool = bodies[1]["messages"][1:3]
    assert (tool["role"], tool["content"]) == ("tool", "rain, 4 degrees")
    assert tool["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_an_answer_is_held_to_a_schema(page: Page) -> None:
    page.click("text=JSON schema >> nth=0")
    expect(page.locator("[data-setting=schema]")).to_be_focused()
    page.fill("[data-setting=schema]", '{"type": ')
    expect(page.locator("#schema-fault")).to_contain_text("not valid JSON")
    page.fill("#input", "How old?")
    page.press("#input", "Enter")
    expect(page.locator("#input")).to_have_value("How old?")  # not sent, not lost
    assert page.locator(".bubble").count() == 0
    page.fill("[data-setting=schema]", '{"type": "object", "properties": {"age": {"enum": [7]}}, "required": ["age"]}')
    page.press("#input", "Enter")
    expect(page.locator(".badge")).to_have_text("✓ valid JSON")
    assert page.inner_text(".answer pre") == '{\n  "age": 7\n}'


def test_probabilities_are_shown_on_hover_and_by_keyboard(page: Page) -> None:
    page.click("text=Probabilities")
    page.click("text=Sampling")
    page.fill("[data-setting=temperature]", "0")  # takes the most probable token
    say(page, "Hello")
    tokens = page.locator(".token")
    assert tokens.count() > 2
    tokens.nth(1).hover()
    popup = page.locator("#alternatives")
    expect(popup.locator("> div")).to_have_count(5)
    expect(popup.locator(".chosen")).to_have_count(1)
    expect(popup.locator(".chosen")).to_contain_text("%")
    page.mouse.move(5, 5)
    expect(popup).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(popup).to_be_visible()
    page.get_by_role("button", name="Show or hide probabilities").click()
    expect(page.locator(".answer .content > p")).to_be_visible()


def test_the_system_prompt_and_sampling_are_sent(page: Page) -> None:
    bodies = script(page, text_answer("one"), text_answer("two"))
    page.fill("[data-setting=system]", "Be brief.")
    page.click("text=Sampling")
    page.fill("[data-setting=temperature]", "0.5")
    page.fill("[data-setting=top_k]", "7")
    page.fill("[data-setting=stop]", "END\n###")
    say(page, "Hello")
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    wanted = {"temperature": 0.5, "top_k": 7, "stop": ["END", "###"], "model": "weft-demo"}
    assert wanted.items() <= bodies[0].items()
    assert not {"top_p", "seed", "tools", "response_format", "logprobs"} & set(bodies[0])
    page.fill("[data-setting=temperature]", "")
    page.reload()
    expect(page.locator("[data-setting=system]")).to_have_value("Be brief.")
    say(page, "Again")
    assert "temperature" not in bodies[1]
    assert [m["content"] for m in bodies[1]["messages"]] == ["Be brief.", "Hello", "one", "Again"]


def test_messages_are_edited_and_answers_made_anew(page: Page) -> None:
    bodies = script(page, *(text_answer(f"answer {i}") for i in range(3)))
    say(page, "frist")
    page.hover(".user")
    page.get_by_role("button", name="Edit message").click()
    expect(page.locator("#editing")).to_be_visible()
    expect(page.locator("#input")).to_have_value("frist")
    say(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .content")).to_have_text("answer 2")
    assert [body["messages"] for body in bodies[1:]] == [[{"role": "user", "content": "first"}]] * 2


def test_conversations_are_renamed_exported_and_deleted(page: Page) -> None:
    script(page, text_answer("one"), text_answer("two"))
    say(page, "First")
    page.click("#new-chat")
    say(page, "Second")
    items = page.locator(".conversations li")
    expect(items).to_have_count(2)
    page.get_by_role("button", name="Rename Second").click()
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Renamed")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Renamed").click()
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "Renamed.json"
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Renamed").click()
    expect(items).to_have_count(1)
    expect(page.locator(".card")).to_have_count(6)
    page.click(".conversations .open")
    expect(page.locator(".bubble")).to_have_text("First")


def test_an_example_fills_the_playground(page: Page) -> None:
    bodies = script(page, text_answer("fine"))
    page.click(".card:has-text('weather')")
    expect(page.locator(".answer .content")).to_have_text("fine")
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    expect(page.locator("[data-toggle=tools_on]")).to_have_attribute("aria-pressed", "true")


@pytest.mark.slow
def test_a_dead_engine_and_a_shutdown_each_say_what_happened(open_page: Open, serve: Serve, long_model: str) -> None:
    server = serve(long_model, "--dtype", "float32", WEFT_DRAIN_TIMEOUT_S="0")
    page = open_page(server.base_url)
    ask_for_something_long(page)
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{20}"))
    (engine,) = server.children(ENGINE)
    os.kill(engine, signal.SIGKILL)
    expect(page.locator(".error")).to_contain_text("The engine is away")
    while server.children(ENGINE) in ([], [engine]):
        time.sleep(0.05)
    server.wait_ready()
    expect(page.locator("#pill-text")).to_have_text("idle")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer pre")).to_have_text(re.compile(r".{20}"))
    server.stop()
    expect(page.locator(".error")).to_contain_text("The server was shut down.")
    expect(page.locator("#pill-text")).to_have_text("server is away")
    page.fill("#input", "Still there?")
    page.press("#input", "Enter")
    expect(page.locator(".error").last).to_contain_text("The server cannot be reached.")


@pytest.mark.slow
def test_from_the_command_to_the_first_character(browser: Browser, serve: Serve) -> None:
    """Slow only because its bound means little on a machine that does other things at the same time."""
    start = time.monotonic()
    server = serve()
    with pages(browser) as open_page:
        page = open_page(server.base_url)
        page.fill("#input", "Hello")
        page.press("#input", "Enter")
        page.wait_for_function("() => document.querySelector('.answer .content').innerText.length > 0", polling="raf")
        seconds = time.monotonic() - start
    print(f"{seconds:.2f} s")
    assert seconds < 8
