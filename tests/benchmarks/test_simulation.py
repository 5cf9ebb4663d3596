"""benchmarks/simulation: what it compares, and the model and trace that it makes."""

import json
import pathlib

from benchmarks.simulation import HASH_TOKENS, Round, make_trace, summary, table, write_model
from weft.engine.wire.options import Finished
from weft.server.cli.simulate import Outcome


def test_errors_are_of_predictions_relative_to_what_was_measured() -> None:
    rounds = [
        Round({"a": 8.0}, {"a": 11.0}, 1.5, {"a": 10.0}, 2.0, 0.1),
        Round({"a": 15.0}, {"a": 9.0}, 1.0, {"a": 10.0}, 1, 0.1),
    ]
    (cells,) = zip(*(column.cells for column in table(rounds).columns), strict=True)
    assert cells == ("a", "8, 11 / 10", "15, 9 / 10", "35%", "10%")


def test_what_is_compared_is_what_clients_see() -> None:
    told = summary(Outcome(2, Finished([0.1, 0.3], [0.02], 100, 30, 50, 1.0, 10.0, {}), 10.0))
    assert (told["first token mean ms"], told["output tokens/s"], told["cached %"]) == (200.0, 3.0, 50.0)


def test_the_trace_is_as_long_as_its_hash_ids_say(tmp_path: pathlib.Path) -> None:
    trace = make_trace(50, 2.0, 0)
    assert trace == make_trace(50, 2.0, 0) and trace != make_trace(50, 2.0, 1)
    assert all(0 < line.input_length - HASH_TOKENS * len(line.hash_ids) < HASH_TOKENS for line in trace)
    assert json.loads((write_model(tmp_path / "m") / "config.json").read_text())["num_hidden_layers"] == 10
