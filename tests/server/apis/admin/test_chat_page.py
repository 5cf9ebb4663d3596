import hashlib
import pathlib
import re
from typing import Any

import pytest

from docs.vendor import LIBRARIES

FOLDER = pathlib.Path(__file__).parents[4] / "server" / "chat_page"
OWN = [path for path in sorted(FOLDER.iterdir()) if path.is_file()]
VENDOR = FOLDER / "vendor"
LATER = [f"/chat_page/vendor/{name}.js" for name in ("highlight", "katex", "pdf", "pdf.worker")]
"""Loaded once they are needed."""
PATHS = ["/", *(f"/chat_page/{path.name}" for path in OWN if path.name != "index.html")]
PATHS += [f"/chat_page/vendor/{path.stem}" for path in VENDOR.glob("*.js.gz")]
KEYS = {"api_key": ("secret",)}


@pytest.mark.parametrize("path", PATHS)
def test_every_file_comes_without_a_key_and_under_the_policy(make_site: Any, path: str) -> None:
    reply = make_site(**KEYS).call("GET", path)
    assert reply.status == 200
    kind = {"/": "text/html", "css": "text/css", "js": "text/javascript"}[path.rsplit(".")[-1]]
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["trusted-types"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


def test_the_page_names_every_file_so_that_all_are_loaded_at_once(site: Any) -> None:
    named = re.findall(r'(?:href|src)="(chat_page/[^"]+)"', site.call("GET", "/").text)
    assert sorted([f"/{path}" for path in named] + LATER) == sorted(PATHS[1:])


def test_libraries_are_what_their_checksums_and_licenses_say() -> None:
    sums = dict(reversed(line.split()) for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    assert {name: digest for name, digest in files.items() if name != "SHA256SUMS"} == sums
    licenses = (VENDOR / "LICENSES.txt").read_text()
    for name, library in LIBRARIES.items():
        assert f"{name}: {library.package} {library.version}\n" in licenses
    assert sorted(LIBRARIES) == sorted(path.stem for path in VENDOR.glob("*.js.gz"))


def test_the_page_and_its_libraries_weigh_little(site: Any) -> None:
    replies = {path: site.call("GET", path) for path in PATHS}
    weights = {path: int(reply.headers["content-length"]) for path, reply in replies.items()}
    assert sum(weights.values()) < 1_000_000
    assert sum(weight for path, weight in weights.items() if path not in LATER) < 300_000


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_are_sent_packed_to_those_who_unpack_them(site: Any, name: str) -> None:
    path = f"/chat_page/vendor/{name}"
    packed, plain = (site.call("GET", path, headers={"accept-encoding": names}) for names in ("br, gzip", "identity"))
    assert (packed.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    assert packed.text == plain.text  # the client has unpacked one
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert packed.headers["etag"] != plain.headers["etag"]


def test_other_paths_beside_them_stay_shut(make_site: Any) -> None:
    site = make_site(**KEYS)
    assert [site.call("GET", path).status for path in ("/chat_page", "/chat_page/", "/chat_page/x.js")] == [401] * 3


def test_a_browser_that_has_a_file_is_told_so(site: Any) -> None:
    etag = site.call("GET", "/").headers["etag"]
    again = site.call("GET", "/", headers={"if-none-match": etag})
    assert (again.status, again.text) == (304, "")
    assert site.call("GET", "/", headers={"if-none-match": '"other"'}).status == 200
    assert site.call("HEAD", "/").status == 200


def test_no_file_makes_html_of_text_or_names_another_host() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "//cdn",
        ):
            assert word not in text, f"{path.name}: {word}"
        assert "https://" not in text.replace("https?://", ""), path.name
