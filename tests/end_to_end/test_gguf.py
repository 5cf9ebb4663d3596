"""`weft serve model.gguf`, as a user starts it, with the answers of the checkpoint that the file was made of."""

import json
import pathlib
import subprocess
import sys

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.checkpoints import Checkpoint, load_reference
from tests.end_to_end.conftest import TIMEOUT_S, Serve
from tests.gguf_files import write_model
from tests.tokenizers_for_tests import byte_level

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SIZES: dict[str, object] = {
    "vocab_size": 702,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def kinds(name: str) -> Kind:
    return Kind.Q8_0 if "token_embd" in name or "attn_v" in name else Kind.Q4_1


def test_a_file_is_served_with_its_tokenizer_and_template(tmp_path: pathlib.Path, serve: Serve) -> None:
    file, plain = write_model(tmp_path / "model", "qwen3", Checkpoint("qwen3", SIZES), kinds, chat_template=TEMPLATE)
    cache = str(tmp_path / "cache")
    server = serve(str(file), "--dtype", "float32", XDG_CACHE_HOME=cache)
    assert server.get("/v1/models").json()["data"][0]["id"] == "model"
    prompt = byte_level(vocab_size=700).encode(f"<|im_start|>{'hello ' * 5}<|im_end|>").ids
    ids, reference = torch.tensor(prompt), load_reference(plain)
    for _ in range(8):
        with torch.inference_mode():
            ids = torch.cat((ids, reference(ids[None]).logits[0, -1:].argmax(-1)))
    body = {"messages": [{"role": "user", "content": "hello " * 5}], "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt), json.dumps(answer)
    assert answer["choices"][0]["token_ids"] == ids[len(prompt) :].tolist()


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_file_that_cannot_be_served_is_one_line_and_exit_code_2(tmp_path: pathlib.Path, command: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0")
    done = subprocess.run(
        [sys.executable, "-m", "weft.server", command, str(tmp_path / "bad.gguf")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    fault = f"model: {tmp_path}/bad.gguf: bad.gguf is truncated: its header ends behind its end (8 bytes)"
    assert fault in done.stderr and done.stderr.count("\n") == 1
