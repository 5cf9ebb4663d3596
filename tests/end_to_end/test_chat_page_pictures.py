"""Pictures on the chat page: pasted, dropped and chosen, sent to a model that sees, kept, and refused in words."""

import base64
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.browser import STORED, Tab, chunk, say, script, stream, text_answer
from tests.end_to_end.conftest import LiveServer, serving
from tests.end_to_end.test_chat_page_access import Audit
from tests.end_to_end.test_chat_page_state import FULL
from tests.picture_checkpoints import encoded, picture, write_llava

SMALL, TALL = encoded(picture(1, 40, 30)), encoded(picture(2, 30, 60), "JPEG")
PASTE = """async data => {
    const blob = new Blob([Uint8Array.from(atob(data), c => c.charCodeAt(0))], { type: "image/png" });
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
}"""
GIVE = """([kind, files, isSentAtOnce]) => {
    const data = new DataTransfer();
    for (const [name, type, bytes] of files) {
        data.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, { type }));
    }
    const options = { bubbles: true, cancelable: true };
    document.body.dispatchEvent(kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent(kind, { ...options, dataTransfer: data }));
    if (isSentAtOnce) document.querySelector("#composer").requestSubmit();
}"""
THUMBNAILS, FAULT = "#attached .thumbnail img", "#attach-fault"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llava")
    write_llava(folder)
    options = "--dtype", "float32", "--kv-cache-memory", "8MB", "--served-model-name", "eyes"
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(log, str(folder), *options, WEFT_SERVER_PROCESSES="1") as server:
        yield server


@pytest.fixture(scope="module")
def seeing_tab(browser: Browser) -> Iterator[Tab]:
    tab = Tab(browser, permissions=["clipboard-read", "clipboard-write"])
    yield tab
    tab.context.close()


@pytest.fixture
def eyes(seeing_tab: Tab, seeing: LiveServer) -> Iterator[Page]:
    """The chat page beside a model that sees."""
    page = seeing_tab.open(seeing.base_url)
    expect(page.locator("#add-pictures")).to_be_visible()
    yield page
    seeing_tab.forget(seeing.base_url)
    seeing_tab.check()


def file(name: str, kind: str, data: bytes) -> Any:
    return {"name": name, "mimeType": kind, "buffer": data}


def give(page: Page, kind: str, *files: tuple[str, str, bytes], is_sent_at_once: bool = False) -> None:
    """Paste or drop files."""
    given = [(name, type, base64.b64encode(data).decode()) for name, type, data in files]
    page.evaluate(GIVE, [kind, given, is_sent_at_once])


def choose(page: Page, *files: tuple[str, str, bytes]) -> None:
    page.set_input_files("#picture-files", [file(*each) for each in files])


def sent(body: dict[str, Any], index: int = -1) -> tuple[list[bytes], Any]:
    """The pictures of a message of a request, which come first, and its words."""
    *pictures, words = body["messages"][index]["content"]
    if words["type"] == "image_url":
        pictures, words = [*pictures, words], {"text": None}
    urls = [each["image_url"]["url"] for each in pictures]
    return [base64.b64decode(url.partition(";base64,")[2]) for url in urls], words["text"]


def expect_shown(page: Page, *names: str) -> None:
    shown = page.locator(".user .picture img")
    expect(shown).to_have_count(len(names))
    for index, name in enumerate(names):
        expect(shown.nth(index)).to_have_attribute("alt", name)
    page.wait_for_function("() => [...document.querySelectorAll('.picture img')].every(i => i.naturalWidth > 0)")


def test_pictures_are_pasted_dropped_chosen_seen_and_kept(eyes: Page) -> None:
    eyes.click("text=Sampling")
    eyes.fill("[data-setting=max_tokens]", "5")
    eyes.focus("#input")
    eyes.evaluate(PASTE, base64.b64encode(SMALL).decode())
    eyes.keyboard.press("Control+V")
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    give(eyes, "dragover", ("tall.jpg", "image/jpeg", TALL))
    expect(eyes.locator("#composer.target")).to_be_visible()
    give(eyes, "drop", ("tall.jpg", "image/jpeg", TALL))
    expect(eyes.locator("#composer.target")).to_have_count(0)
    expect(eyes.locator(THUMBNAILS)).to_have_count(2)
    with eyes.expect_file_chooser() as chooser:
        eyes.get_by_role("button", name="Add pictures").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files([file("c.png", "image/png", SMALL), file("d.png", "image/png", SMALL)])
    expect(eyes.locator(THUMBNAILS)).to_have_count(4)
    eyes.get_by_role("button", name="Remove d.png").press("Enter")
    expect(eyes.get_by_role("button", name="Remove c.png")).to_be_focused()
    title = "tall.jpg, 10 tokens"  # 9, and the end of a line
    expect(eyes.locator(THUMBNAILS).nth(1)).to_have_attribute("title", title)
    eyes.reload()  # before they are sent
    expect(eyes.locator(THUMBNAILS)).to_have_count(3)
    eyes.fill("#input", "What is it?")
    url = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"  # any will do: each has as many tokens
    parts = [*[{"type": "image_url", "image_url": {"url": url}}] * 3, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    reply = httpx.post(f"{eyes.url}v1/chat/completions", json=body, timeout=100).json()
    num_tokens = reply["usage"]["prompt_tokens"]
    expect(eyes.locator("#measured")).to_have_text(f"{num_tokens} of 1,024 tokens")
    with eyes.expect_request("**/v1/chat/completions") as request:
        eyes.press("#input", "Enter")
    pictures, words = sent(request.value.post_data_json)
    assert [Image.open(io.BytesIO(each)).size for each in pictures] == [(40, 30), (30, 60), (40, 30)]
    assert (pictures[1:], words) == ([TALL, SMALL], "What is it?")
    eyes.wait_for_selector("#send:visible")
    expect(eyes.locator(".answer .note")).to_contain_text(f"prompt {num_tokens}")
    expect(eyes.locator(".answer .error")).to_be_hidden()
    expect(eyes.locator(THUMBNAILS)).to_have_count(0)
    eyes.reload()
    expect_shown(eyes, "image.png", "tall.jpg", "c.png")
    eyes.get_by_role("button", name="tall.jpg").click()
    expect(eyes.get_by_role("dialog", name="tall.jpg").get_by_role("img")).to_be_visible()
    eyes.keyboard.press("Escape")
    expect(eyes.locator(".viewer")).to_have_count(0)


def test_a_picture_alone_is_sent_edited_and_answered_anew(eyes: Page) -> None:
    bodies = script(eyes, *(text_answer(f"answer {i}") for i in range(4)))
    give(eyes, "paste", ("a.png", "image/png", SMALL), is_sent_at_once=True)  # while it is still read
    expect(eyes.locator(".answer .content")).to_have_text("answer 0")
    assert sent(bodies[0]) == ([SMALL], None)
    expect(eyes.locator("#title")).to_have_text("a.png")
    eyes.get_by_role("button", name="Edit message").click()
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    choose(eyes, ("b.jpg", "image/jpeg", TALL))
    expect(eyes.locator(THUMBNAILS)).to_have_count(2)
    say(eyes, "And these?")
    assert sent(bodies[1]) == ([SMALL, TALL], "And these?")
    eyes.get_by_role("button", name="Regenerate").click()
    expect(eyes.locator(".answer .content")).to_have_text("answer 2")
    say(eyes, "More")
    assert sent(bodies[3], 0) == ([SMALL, TALL], "And these?")
    eyes.get_by_role("button", name="Previous version").first.click()
    expect_shown(eyes, "a.png")


def test_pictures_go_to_responses_too(eyes: Page) -> None:
    eyes.click("text=Sampling")
    eyes.fill("[data-setting=max_tokens]", "5")
    eyes.check("#background")
    choose(eyes, ("a.png", "image/png", SMALL))
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    with eyes.expect_request("**/v1/responses") as request:
        say(eyes, "What?")
    url = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"}]
    assert request.value.post_data_json["input"] == [{"role": "user", "content": content}]
    expect(eyes.locator(".answer .content")).not_to_be_empty()
    expect(eyes.locator(".answer .note")).to_contain_text("5 tokens")
    expect(eyes.locator(".answer .error")).to_be_hidden()


def test_large_pictures_are_made_smaller_and_upright(eyes: Page) -> None:
    bodies = script(eyes, text_answer("fine"))
    corner = Image.new("RGB", (3000, 1500), "white")
    corner.paste((255, 0, 0), (0, 0, 300, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right, as telephones write it
    clear = Image.new("RGBA", (4000, 2), (0, 255, 0, 128))
    noise = picture(3, 1200, 900).convert("RGBA")
    noise.putalpha(Image.linear_gradient("L").resize(noise.size))
    files = {"a.jpg": encoded(corner, "JPEG", exif=exif), "b.png": encoded(clear), "c.png": encoded(noise)}
    assert len(files["c.png"]) > 1_500_000
    choose(eyes, *((name, f"image/{'jpeg' if name == 'a.jpg' else 'png'}", data) for name, data in files.items()))
    expect(eyes.locator(THUMBNAILS)).to_have_count(3)
    say(eyes, "Look")
    upright, thin, photo = (Image.open(io.BytesIO(data)) for data in sent(bodies[0])[0])
    assert (upright.format, upright.size) == ("JPEG", (1024, 2048))
    red, green, _ = upright.getpixel((1000, 20))  # type: ignore[misc]
    assert red > 200 and green < 60 and min(upright.getpixel((20, 20))) > 200  # type: ignore[type-var, arg-type]
    assert (thin.format, thin.mode, thin.size) == ("PNG", "RGBA", (2048, 1))
    assert (photo.format, photo.size) == ("JPEG", (1200, 900))
    assert min(photo.getpixel((5, 5))) > 200  # type: ignore[type-var, arg-type]


def test_what_cannot_be_a_picture_is_told(eyes: Page) -> None:
    bodies = script(eyes, text_answer("fine"))
    others = [("a.gif", "image/gif"), ("b.HEIC", ""), ("c.avif", "image/avif")]
    give(eyes, "drop", *((name, kind, b"?") for name, kind in others), ("d.png", "image/png", SMALL[:60]))
    for name, _ in others:
        expect(eyes.locator(FAULT)).to_contain_text(f"{name} is not attached: pictures must be PNG, JPEG or WebP.")
    expect(eyes.locator(FAULT)).to_contain_text("d.png cannot be read: it is damaged, or no picture.")
    expect(eyes.locator("#attached li")).to_have_count(0)
    give(eyes, "drop", ("e.svg", "image/svg+xml", b"<svg/>"))
    expect(eyes.locator(FAULT)).to_have_text("e.svg goes along as text: pictures must be PNG, JPEG or WebP.")
    expect(eyes.locator("#attached .name")).to_have_text("e.svg")
    eyes.get_by_role("button", name="Remove e.svg").click()
    eyes.fill("#input", "Look")
    give(eyes, "paste", ("f.gif", "image/gif", b"?"), is_sent_at_once=True)
    expect(eyes.locator(FAULT)).to_contain_text("f.gif is not attached")
    assert bodies == []  # not without what was meant to go along
    choose(eyes, *((f"{number}.png", "image/png", SMALL) for number in range(12)))
    expect(eyes.locator(THUMBNAILS)).to_have_count(10)
    expect(eyes.locator(FAULT)).to_have_text("A message holds at most 10 pictures; the others are not attached.")
    film = [picture(seed, 8, 8) for seed in range(2)]
    eyes.get_by_role("button", name="Remove 3.png").click()
    choose(eyes, ("g.webp", "image/webp", encoded(film[0], "WEBP", save_all=True, append_images=film[1:])))
    expect(eyes.locator(FAULT)).to_contain_text(re.compile("^g.webp: .*it must be one still picture, got 2 frames"))


def test_a_model_that_sees_nothing_gets_no_pictures(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("weft-demo")
    expect(page.locator("#add-pictures")).to_be_hidden()
    for kind in ("paste", "drop"):
        give(page, kind, ("a.png", "image/png", SMALL))
        expect(page.locator(FAULT)).to_have_text("weft-demo sees no pictures, so a.png is not attached.")
        page.reload()
        expect(page.locator("#model")).to_have_text("weft-demo")
    expect(page.locator("#attached li")).to_have_count(0)


def test_after_a_change_to_a_model_that_sees_nothing_names_are_sent(eyes: Page) -> None:
    bodies = script(eyes, text_answer("one"), text_answer("two"))
    choose(eyes, ("a.png", "image/png", SMALL))
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    say(eyes, "Look")
    expect(eyes.locator(".user .below")).not_to_contain_text("sees no pictures")
    choose(eyes, ("b.png", "image/png", SMALL))
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    eyes.route("**/stats*", lambda route: route.fulfill(json={**route.fetch().json(), "input_modalities": ["text"]}))
    expect(eyes.locator("#add-pictures")).to_be_hidden()
    expect(eyes.locator(".user .below")).to_contain_text("This model sees no pictures: it gets their names.")
    eyes.fill("#input", "And now?")
    eyes.press("#input", "Enter")
    expect(eyes.locator(FAULT)).to_have_text("eyes sees no pictures: remove them, or choose another model.")
    eyes.get_by_role("button", name="Remove b.png").click()
    eyes.press("#input", "Enter")
    expect(eyes.locator(".answer .content")).to_have_text(["one", "two"])
    assert [m["content"] for m in bodies[1]["messages"]] == ["[Picture: a.png]\n\nLook", "one", "And now?"]


def test_pictures_are_exported_and_imported(eyes: Page, tmp_path: pathlib.Path) -> None:
    script(eyes, text_answer("fine"))
    choose(eyes, ("a.png", "image/png", SMALL), ("b.jpg", "image/jpeg", TALL))
    expect(eyes.locator(THUMBNAILS)).to_have_count(2)
    say(eyes, "Look")
    eyes.click("#kept")
    (before,) = eyes.evaluate(STORED)
    for kind in ("json", "md"):
        with eyes.expect_download() as download:
            eyes.click("#export-json" if kind == "json" else "#export-markdown")
        download.value.save_as(path := tmp_path / f"chats.{kind}")
        if kind == "json":
            path.write_text(path.read_text().replace(before["id"], "other"))
        eyes.set_input_files("#import-file", path)
        expect(eyes.locator("#moved")).to_have_text('"Look" is imported.')
        (after,) = (chat for chat in eyes.evaluate(STORED) if chat["id"] != before["id"] and chat["time"])
        shown = [[(each["name"], each["url"]) for each in chat["messages"][0]["files"]] for chat in (before, after)]
        assert shown[0] == shown[1] and after["messages"][0]["content"] == "Look"
        eyes.once("dialog", lambda dialog: dialog.accept())
        eyes.locator(".conversations li:not(.current)").hover()
        eyes.locator(".conversations li:not(.current)").get_by_role("button", name="Delete Look").click()
        expect(eyes.locator(".conversations li")).to_have_count(1)
    hostile = '[{"name": "a", "text": "b", "url": "https://x.org/a.png"}]'
    path.with_suffix(".json").write_text(
        f'{{"title": "t", "messages": [{{"role": "user", "content": "c", "files": {hostile}}}]}}'
    )
    eyes.set_input_files("#import-file", path.with_suffix(".json"))
    eyes.click(".conversations .open:has-text('t') >> nth=0")
    expect(eyes.locator(".user .bubble")).to_have_text("c")
    expect(eyes.locator(".user img")).to_have_count(0)


def test_a_full_storage_is_told_and_keeps_the_words(eyes: Page) -> None:
    script(eyes, *[stream(chunk({"content": "fine"}), chunk({}, "stop"))] * 2)
    eyes.evaluate(FULL)
    choose(eyes, ("a.png", "image/png", encoded(picture(1, 200, 200))))
    expect(eyes.locator(THUMBNAILS)).to_have_count(1)
    say(eyes, "Look")
    expect(eyes.locator("#full")).to_be_visible()
    expect_shown(eyes, "a.png")
    eyes.evaluate("localStorage.setItem('filling', 'x'.repeat(5242880 - 50000))")  # room for words alone
    eyes.on("dialog", lambda dialog: dialog.accept())
    eyes.reload()
    eyes.click(".conversations .open:has-text('Look')")
    expect(eyes.locator(".user details.file")).to_contain_text("(This picture was not kept.)")
    expect(eyes.locator(".user .bubble")).to_have_text("Look")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_use_them(eyes: Page, scheme: Any) -> None:
    script(eyes, text_answer("fine"))
    eyes.emulate_media(color_scheme=scheme)
    audit = Audit(eyes)
    files = [("a.png", "image/png", SMALL), ("b.jpg", "image/jpeg", TALL), ("c.gif", "image/gif", b"")]
    choose(eyes, *files)
    expect(eyes.locator(THUMBNAILS)).to_have_count(2)
    audit.look("attached")
    eyes.set_viewport_size({"width": 360, "height": 720})
    audit.look("on a phone")
    assert eyes.evaluate("document.documentElement.scrollWidth") == 360
    say(eyes, "Look")
    audit.look("sent")
    assert eyes.evaluate("document.querySelector('#log').scrollWidth") == 360
    eyes.get_by_role("button", name="a.png").click()
    audit.look("in full")
    eyes.get_by_role("button", name="Close").click()
    expect(eyes.locator(".viewer")).to_have_count(0)
    eyes.set_viewport_size({"width": 1280, "height": 800})
    assert audit.faults == {}
