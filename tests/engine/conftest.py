from collections.abc import Callable, Iterator
from pathlib import Path

import llguidance
import pytest
import torch

from tests.checkpoints import CHECKPOINTS, WIDE_CHECKPOINTS, write_checkpoint
from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.native_variants import RUNNABLE, load_variant
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.schedule import speculator
from weft.engine.start.draft_model import SmallSteps


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name in `CHECKPOINTS` or `WIDE_CHECKPOINTS` -> its folder, written the first time that anybody asks for it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            write_checkpoint((CHECKPOINTS | WIDE_CHECKPOINTS)[name], folder)
        return folder

    return find


@pytest.fixture(params=RUNNABLE)
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """Each instruction set that this machine runs, with the threads that it had at first."""
    loaded = load_variant(request.param)
    yield loaded
    loaded.set_num_threads(torch.get_num_threads())


@pytest.fixture(scope="session")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text(), eos_token=[0])


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that does not depend on how fast this machine is at the moment."""
    monkeypatch.setattr(speculator, "price_of_drafts", lambda cost, contexts: (0.05, 1.0))


@pytest.fixture
def cheap_small_steps(cheap_drafts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small steps of tiny models cost as much as large ones, so that their drafts would never pay; here they do.

    What an engine sets in torch is undone.
    """
    monkeypatch.setattr(SmallSteps, "price", lambda self, step_s: 0.05)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
