import torch

from weft.engine.kernels.cpu import library
from weft.engine.run.machine_facts import collect


def test_facts_are_those_of_torch_and_the_kernels() -> None:
    facts = collect()
    assert len(facts.cuda_devices) == torch.cuda.device_count()
    assert facts.cuda_version == torch.version.cuda
    assert facts.native in (None, *facts.compiled)
    assert set(facts.compiled) <= set(library.VARIANTS)
    assert facts.free_bytes > 10**6
