"""What `weft batch` makes of settings and input; tests/end_to_end/test_batch_command.py runs the command."""

import json
import pathlib

import pytest

from weft.server.cli.batch import _job
from weft.server.settings import Settings, StartError


def test_lines_may_ask_for_an_adapter(tmp_path: pathlib.Path) -> None:
    """They were refused, although `--lora` kept memory for it."""
    models = {"a": {"aliases": ["x"], "lora": {"mine": "/adapters/mine"}}, "b": {}}
    settings, source = Settings.model_validate({"models": models}), tmp_path / "in.jsonl"
    for model in ("mine", "a", "x", "b", "other"):
        body = {"model": model, "prompt": "Say"}
        line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}
        source.write_text(json.dumps(line))
        if model != "other":
            assert _job(settings, source, tmp_path / "out.jsonl").model == model
    with pytest.raises(
        StartError, match=r"the model 'other', and this one is a, x, b, mine \(--served-model-name, --l"
    ):
        _job(settings, source, tmp_path / "out.jsonl")
