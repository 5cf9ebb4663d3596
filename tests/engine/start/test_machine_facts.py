from pathlib import Path

import pytest
import torch

from weft.engine.kernels.cpu.variants import VARIANTS
from weft.engine.start.report import _machine as collect
from weft.engine.tune import compare
from weft.engine.wire.machine import KernelChoice


def test_facts_are_those_of_torch_and_the_kernels() -> None:
    facts = collect()
    assert len(facts.cuda_devices) == torch.cuda.device_count()
    assert facts.cuda_version == torch.version.cuda
    assert facts.native in (None, *facts.compiled)
    assert set(facts.compiled) <= set(VARIANTS)
    assert facts.free_bytes > 10**6


def test_choices_of_this_machine_are_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert collect().settled == ()
    settled = KernelChoice("sampler", "vocabulary of 9", ("native", "torch"), "torch", ())
    compare.open_choices(torch.device("cpu")).keep(settled)
    compare.ChoiceFile(compare.default_path(), "another machine").keep(settled)
    assert collect().settled == (settled,)
