from pathlib import Path

from tests.triton_interpreter import needs_triton, run_interpreted


@needs_triton
def test_parity_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_layers.py"))
