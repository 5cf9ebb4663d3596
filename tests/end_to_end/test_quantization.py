"""`--quantization int8`, as an operator uses it, on the demo model."""

import subprocess
import sys

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, Serve
from weft.engine.kernels.cpu.library import load


@pytest.mark.skipif(load() is None, reason="no native kernels on this machine")
def test_int8_is_served_and_said(serve: Serve) -> None:
    server = serve("--quantization", "int8")
    body = {"model": "weft-demo", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).json()
    assert answer["choices"][0]["message"]["content"] == "3 + 4 = 7."
    assert "layers: native int8 (" in server.log.read_text()


@pytest.mark.skipif(load() is None, reason="no native kernels on this machine")
def test_the_plan_says_int8_and_half_the_weights() -> None:
    command = [sys.executable, "-m", "weft.server", "plan", "--device", "cpu"]
    lines = [
        dict(line.split(maxsplit=1) for line in subprocess.check_output([*command, *more], text=True).splitlines())
        for more in ([], ["--quantization", "int8"])
    ]
    assert [plan["device"] for plan in lines] == ["cpu, bfloat16", "cpu, bfloat16, matrices in int8"]
    plain, quantized = (float(plan["weights"].removesuffix(" MB")) for plan in lines)
    assert 0.5 < quantized / plain < 0.55  # every row has a scale


def test_int8_in_another_type_ends_with_one_line_and_code_2(serve: Serve) -> None:
    server = serve("--quantization", "int8", "--dtype", "float32", ready=False)
    assert server.process.wait(TIMEOUT_S) == 2
    assert "quantization int8 needs dtype bfloat16 on device cpu, got float32" in server.log.read_text()
