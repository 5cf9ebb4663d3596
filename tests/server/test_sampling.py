"""The setting `default_sampling`, and who goes before whom: request, operator, checkpoint, API."""

import json
import pathlib
from typing import Any

import pytest

from weft.server.resolve import resolve
from weft.server.settings import StartError

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
OLLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["temperature=0.7,top_p=0.9"], {"temperature": 0.7, "top_p": 0.9}),
        (["temperature=0.7", "top_k=5"], {"temperature": 0.7, "top_k": 5}),
        (" min_p = 0.1 , top_k=-1", {"min_p": 0.1, "top_k": -1}),
        ('{"repetition_penalty": 1.1}', {"repetition_penalty": 1.1}),
        ({"temperature": 0}, {"temperature": 0}),
    ],
)
def test_the_setting_has_several_forms(given: object, expected: dict[str, float]) -> None:
    assert resolve({"default_sampling": given}, {}).settings.default_sampling == expected


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("temp=1", "'temp' has no default here; there is temperature, top_p, top_k, min_p, repetition_penalty"),
        ("temperature", "temperature: expected a number, got ''"),
        ("temperature=hot", "temperature: expected a number, got 'hot'"),
        ("top_k=1.5", "top_k: expected a number, got 1.5"),
        ("temperature=nan", "temperature: temperature must be"),
        ("top_p=2", "top_p: top_p must be"),
        ({"min_p": True}, "min_p: expected a number, got True"),
        (3, "input should be of the form temperature=0.7,top_p=0.9, or a mapping"),
    ],
)
def test_what_no_request_may_have_is_refused(given: object, fault: str) -> None:
    with pytest.raises(StartError) as error:
        resolve({"default_sampling": given}, {})
    assert str(error.value).startswith(f"--default-sampling: {fault}")


def sampled(site: Any, path: str, **options: float) -> dict[str, float]:
    """What the engine is asked for."""
    body: dict[str, Any] = {"stream": False, "prompt": "Hi"}
    if path.endswith(("/chat", "completions")):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    body |= {"options": options} if path.startswith("/api") else options
    assert site.call("POST", path, json=body).status == 200
    return {name: getattr(site.engine.asked[-1].params, name) for name in PLAIN}


def write(folder: pathlib.Path, **config: object) -> str:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return str(folder)


def test_ollama_has_its_own_where_nobody_states_any(site: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert sampled(site, path) == OLLAMA
        assert sampled(site, path, temperature=0, min_p=0.2) == {**OLLAMA, "temperature": 0.0, "min_p": 0.2}
        assert sampled(site, path, repeat_penalty=1.1)["repetition_penalty"] == 1.1
    assert sampled(site, "/v1/chat/completions") == PLAIN
    assert sampled(site, "/completion") == PLAIN


def test_of_a_gguf_file_ollama_takes_only_what_it_states(make_site: Any, tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, temperature=0.6, assumed={"top_k": 40, "top_p": 0.95, "min_p": 0.05})
    site = make_site(model=folder)
    assert sampled(site, "/v1/chat/completions") == {
        "temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0
    }  # fmt: skip
    assert sampled(site, "/api/chat") == {**OLLAMA, "temperature": 0.6}


def test_the_operator_goes_before_the_checkpoint_and_after_the_request(
    make_site: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, temperature=0.6, top_k=20, assumed={"top_p": 0.95})
    with caplog.at_level("INFO"):
        site = make_site(model=folder, default_sampling={"temperature": 0.3, "top_p": 0.5})
    assert "sampled with temperature 0.3, top_p 0.5, top_k 20" in caplog.text
    for path in ("/v1/chat/completions", "/api/chat", "/completion"):
        asked = sampled(site, path)
        assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.3, 0.5, 20)
        assert sampled(site, path, temperature=1.5)["temperature"] == 1.5
    (card, _) = site.call("GET", "/v1/models").json["data"]
    assert card["default_sampling_params"] == {"temperature": 0.3, "top_p": 0.5, "top_k": 20}


def test_one_of_several_models_may_have_its_own(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "weft.yaml"
    config.write_text("default_sampling: {top_k: 9}\nmodels:\n  a: /a\n  b: {model: /b, default-sampling: top_p=0.5}\n")
    settings = resolve({}, {}, config).settings
    assert settings.for_model("a").default_sampling == {"top_k": 9}
    assert settings.for_model("b").default_sampling == {"top_p": 0.5}
