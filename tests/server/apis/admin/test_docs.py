import re
from typing import Any


def test_the_page_loads_nothing(site: Any) -> None:
    """/docs was FastAPI's: a page whose script and style came from another host, blank without a network."""
    reply = site.call("GET", "/docs")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", reply.text)


def test_the_page_shows_routes_and_fields(site: Any) -> None:
    text = site.call("GET", "/docs").text
    description = site.call("GET", "/openapi.json").json
    assert all(path in text for path in description["paths"])
    for name, schema in description["components"]["schemas"].items():
        assert f'<h2 id="{name}">' in text
        assert all(f"<code>{field}</code>" in text for field in schema.get("properties", {}))
    assert set(re.findall(r'href="#(\w+)"', text)) <= set(re.findall(r'id="(\w+)"', text))
    assert '<td><code>messages</code><td>list of <a href="#Message">Message</a><td>required' in text
    assert "<td><code>stop</code><td>string or list of string<td>" in text
    assert "/v1/models/{model_id}" in text
    assert '<a href="#DecisionBody">DecisionBody</a> or <a href="#SglangBody">' in text


def test_the_description_has_the_errors_that_are_sent(site: Any) -> None:
    """FastAPI described a 422 with its own body for every route; what is sent is a 400 in OpenAI's shape."""
    text = site.call("GET", "/openapi.json").text
    assert "422" not in text and "HTTPValidationError" not in text
    for methods in site.call("GET", "/openapi.json").json["paths"].values():
        for operation in methods.values():
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]["properties"]["error"]
            assert set(error["properties"]) == set(site.call("GET", "/nope").error)
