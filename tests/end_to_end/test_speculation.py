"""`--speculative`, as an operator uses it, on the demo model."""

import pathlib
import subprocess
import sys

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, Serve
from weft import server as package
from weft.engine.kernels.cpu.library import load

DEMO = str(pathlib.Path(package.__file__).parent / "demo_model")
DRAFT = f"{DEMO}/draft"


@pytest.mark.parametrize(
    ("value", "said"),
    [("ngram", "callers, ngram"), (DEMO, "callers, draft model demo_model"), (DRAFT, "callers, draft model draft")],
    ids=["ngram", "model", "draft"],
)
def test_the_answer_is_the_same_and_drafts_are_counted(serve: Serve, value: str, said: str) -> None:
    server = serve("--speculative", value)
    body = {"prompt": "1 2 3 1 2 3 1 2 3", "temperature": 0, "max_tokens": 60, "ignore_eos": True, "model": "weft-demo"}
    chat = {"model": "weft-demo", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=chat, timeout=TIMEOUT_S).json()
    assert answer["choices"][0]["message"]["content"] == "3 + 4 = 7."
    assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=TIMEOUT_S).status_code == 200
    assert f"speculation: predictions of the {said}" in server.log.read_text()
    assert server.metric("weft:spec_decode_num_draft_tokens_total") > 0


@pytest.mark.skipif(load() is None, reason="no native kernels on this machine")
def test_the_plan_names_the_draft_model() -> None:
    command = [sys.executable, "-m", "weft.server", "plan", "--device", "cpu", "--speculative", DEMO]
    plan = dict(line.split(maxsplit=1) for line in subprocess.check_output(command, text=True).splitlines()[2:])
    assert plan["draft"].startswith("model  demo_model (")
    weights_bytes = (pathlib.Path(DEMO) / "model.safetensors").stat().st_size
    assert float(plan["weights"].removesuffix(" MB")) == pytest.approx(2 * weights_bytes / 1e6, rel=0.02)


def test_a_draft_model_that_is_nowhere_ends_with_one_line_and_code_2(serve: Serve) -> None:
    server = serve("--speculative", "/no/where", ready=False)
    assert server.process.wait(TIMEOUT_S) == 2
    assert server.log.read_text().strip() == "weft: error: speculative: no such folder: /no/where"
