from weft.server.cli.tables import describe, describe_values, render_table
from weft.server.resolve import resolve
from weft.server.settings import Settings


def test_description_shows_value_and_origin_but_no_secret() -> None:
    lines = describe(resolve({"port": "9", "api_key": ["one", "two"]}, {"WEFT_MAX_BODY_BYTES": "3MiB"})).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert set(rows) == set(Settings.model_fields)
    assert rows["port"] == "9 --port"
    assert rows["max_body_bytes"] == "3MiB WEFT_MAX_BODY_BYTES"
    assert rows["api_key"] == "2 set, not shown --api-key"
    assert rows["prefix_caching"] == "true default"
    assert rows["max_model_len"] == "none default"


def test_values_are_described_by_choices_or_bounds() -> None:
    assert describe_values("device") == "auto, cpu, cuda"
    assert describe_values("port") == "integer >= 0, <= 65535"
    assert describe_values("itl_target_ms") == "number > 0"
    assert describe_values("max_num_seqs") == "integer >= 1"
    assert describe_values("max_body_bytes") == "size"
    assert describe_values("api_key") == "names"


def test_table_has_a_row_for_every_setting() -> None:
    lines = render_table().splitlines()
    assert len(lines) == len(Settings.model_fields) + 2
    assert all(line.count("|") == 6 for line in lines)
    assert "| `port` | `--port` | integer >= 0, <= 65535 | 8000 | Port to listen on; 0 takes a free one. |" in lines
    assert "| `max_n` |  | integer >= 1, <= 1024 | 32 | Maximum choices (n, best_of) of one request. |" in lines
