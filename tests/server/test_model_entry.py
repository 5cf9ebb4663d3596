import json
import pathlib

import pytest

from weft.server.cli.tables import describe
from weft.server.resolve import resolve
from weft.server.settings import Settings, StartError

FILE = """
max_model_len: 64
models:
  chat@v1: {model: /a, aliases: [chat], max-num-seqs: 2, kv_cache_memory: 4MiB}
  chat@v2:
    model: /b
    load: on-demand
    unload_after: 90
    max_model_len: 32
  small: org/name
"""


def test_a_model_takes_the_settings_of_the_server_but_for_its_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(FILE)
    resolved = resolve({"dtype": "float32"}, {}, path)
    settings = Settings.model_validate_json(resolved.settings.model_dump_json())  # as servers get them
    assert list(settings.fleet) == ["chat@v1", "chat@v2", "small"]
    first, second, third = (settings.for_model(name) for name in settings.fleet)
    assert {each.dtype for each in (first, second, third)} == {"float32"}
    assert [each.model for each in (first, second, third)] == ["/a", "/b", "org/name"]
    assert [each.max_model_len for each in (first, second, third)] == [64, 32, 64]
    assert (first.max_num_seqs, first.kv_cache_memory, second.kv_cache_memory) == (2, 4 << 20, None)
    assert first.served_model_name == ("chat@v1", "chat")
    assert (settings.fleet["chat@v2"].load, settings.fleet["chat@v2"].unload_after) == ("on-demand", 90)
    assert "chat@v2=/b (load: on-demand, unload_after: 90.0, max_model_len: 32), small=org/name" in describe(resolved)


def test_one_model_is_a_fleet_of_one() -> None:
    settings = Settings(model="/a", served_model_name=("m", "n"), dtype="float32")
    (name, entry), *more = settings.fleet.items()
    assert (name, entry.model, entry.aliases, entry.load, more) == ("m", "/a", ("n",), "always", [])
    assert settings.for_model("m").served_model_name == ("m", "n")


@pytest.mark.parametrize(
    ("models", "others", "message"),
    [
        ({"a": {"dtipe": "auto"}}, {}, "models: a: no such setting: dtipe (did you mean dtype?)"),
        ({"a": {"port": 1}}, {}, "models: a: no such setting of a model, but of the whole server: port"),
        (
            {"a": {"max_num_seqs": 0}},
            {},
            "models: a.max_num_seqs: input should be greater than or equal to 1, got 0",
        ),
        ({"a": {"load": "later"}}, {}, "models.a.load: input should be 'always' or 'on-demand', got 'later'"),
        ({"a": {"unload_after": 5}}, {}, "models: a: unload_after needs load: on-demand"),
        ({"a": {"aliases": ["b"]}, "b": "/b"}, {}, "models: input should have each name once, got b twice"),
        ({str(number): "/a" for number in range(65)}, {}, "models: value should have at most 64 items"),
        ([], {}, "models: input should be a mapping of names to models, in JSON or YAML"),
        ({"a": "/a"}, {"WEFT_MODEL": "/b"}, "WEFT_MODELS names the models; model is for a single one"),
        ({"a": "/a", "b": "/b"}, {"WEFT_KV_EVENTS": "tcp://*:1"}, "kv_events: each of several models needs an address"),
        (
            {name: {"kv_events": f"tcp://*:{name}", "kv_events_replay": "tcp://*:3"} for name in "12"},
            {},
            "kv_events_replay: each of several models needs an address",
        ),
        ({"a": {"kv_events_replay": "tcp://*:1"}}, {}, "models: a: kv_events_replay needs kv_events"),
    ],
)
def test_faults_name_the_model_and_the_setting(models: object, others: dict[str, str], message: str) -> None:
    with pytest.raises(StartError) as caught:
        resolve({}, {"WEFT_MODELS": json.dumps(models)} | others)
    assert message in str(caught.value)
