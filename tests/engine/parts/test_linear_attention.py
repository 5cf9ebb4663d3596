"""Hybrids of linear attention, short convolutions and gated attention against a full forward pass of transformers."""

from functools import wraps
from pathlib import Path

import pytest
import torch

from tests.architectures import serving
from tests.architectures.checkpoints import load_reference, write
from tests.engine.layers.test_decoder import Runner, make_prompts
from weft.engine.start.startup import Started, start
from weft.engine.weights.reader import RowOrder


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe", "recurrent_gemma"])
def test_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, prompts = write(name, tmp_path), make_prompts(90, 31, 1)
    with torch.inference_mode():
        expected = [load_reference(folder)(prompt[None]).logits[0].log_softmax(-1) for prompt in prompts]
    for chunk_size in (1, 7, 90):
        for logits, target in zip(Runner(folder).run(prompts, chunk_size), expected, strict=True):
            # The share of the values is for those of unlikely ids, around -9.
            torch.testing.assert_close(logits.log_softmax(-1), target, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_answers_are_right_from_kept_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, in chunks, preempted and for choices, with states kept for prompts as short as these."""

    @wraps(start)
    def started(*args: object, **options: object) -> Started:
        made = start(*args, **options)  # type: ignore[arg-type]
        made.engine.scheduler.kv._least_stop = 8
        return made

    monkeypatch.setattr(serving, "start", started)
    assert serving.serve(write("qwen3_5_text", tmp_path)).detail == "prefix cache"


def test_rows_behind_groups_come_after_the_first_part() -> None:
    """As in a matrix whose heads of queries have their gates behind them, and keys and values follow."""
    order = RowOrder(num_groups=2, parts=(2, 1), head=(1, 0), num_heads=3)
    assert order.indices(9).tolist() == [1, 0, 4, 3, 7, 6, 8, 2, 5]
