"""On the CPU's own kernels a request has the same bits whatever adapters share its steps."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import WIDE_CHECKPOINTS, write_checkpoint
from tests.engine.lora.adapters_for_tests import add, start_engine, write_adapter
from tests.engine.test_golden import run
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.block_run import NativeRun
from weft.engine.loop.engine import Engine
from weft.engine.lora.adapted_layers import AdaptedBlocks
from weft.engine.wire.messages import AddRequest, RequestOutput

needs_kernels = pytest.mark.skipif(library.load() is None, reason="the native kernels were not compiled for this CPU")
NUM_ADAPTERS, NUM_REQUESTS = 16, 64
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 256}


def bits(outputs: dict[tuple[int, int], RequestOutput], number: int) -> tuple[object, ...]:
    """Ids and log-probabilities, each as reported."""
    output = outputs[number, 0]
    return tuple(output.token_ids), repr(output.prompt_logprobs), repr(output.logprobs)


def alone(engine: "Engine[Any]", request: AddRequest) -> tuple[object, ...]:
    return bits(run(engine, [request]), request.request_id)


@pytest.fixture(scope="module", params=["qwen3-wide", "gemma2-wide"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, then adapters of it; the second and later ones have the first one's tensors, changed."""
    root = tmp_path_factory.mktemp("mixed")
    write_checkpoint(WIDE_CHECKPOINTS[request.param], root / "model")
    write_adapter(root / "model", root / "1", target_modules="all-linear")
    tensors = load_file(root / "1/adapter_model.safetensors")
    for index in range(2, NUM_ADAPTERS + 1):
        torch.manual_seed(index)
        (root / str(index)).mkdir()
        kept = {name: tensor for name, tensor in tensors.items() if index % 2 or "mlp" in name}
        changed = {name: torch.randn_like(tensor) * 0.3 for name, tensor in kept.items()}
        save_file(changed, root / str(index) / "adapter_model.safetensors")
        (root / str(index) / "adapter_config.json").write_bytes((root / "1/adapter_config.json").read_bytes())
    return [root / "model", *(root / str(index) for index in range(1, NUM_ADAPTERS + 1))]


@needs_kernels
def test_requests_of_many_adapters_are_equal_to_each_alone(folders: list[Path]) -> None:
    engine = start_engine(folders[0], {path.name: path for path in folders[1:]}, **BFLOAT16)
    chance = random.Random(0)
    requests = [
        add(
            number,
            None if number % 5 == 0 else str(number % NUM_ADAPTERS + 1),
            [chance.randrange(4, 60) for _ in range(chance.randrange(1, 40))],
            max_tokens=chance.randrange(2, 9),
        )
        for number in range(NUM_REQUESTS)
    ]
    together = run(engine, requests)
    assert len({bits(together, number) for number in range(NUM_REQUESTS)}) == NUM_REQUESTS
    for request in requests:
        assert alone(engine, uncached(request)) == bits(together, request.request_id)


def uncached(request: AddRequest) -> AddRequest:
    """The same with a salt of its own, so that nothing of its prefix is cached."""
    return msgspec.structs.replace(request, cache_salt=f"alone {request.request_id}")


@needs_kernels
def test_who_uses_no_adapter_gets_the_bits_of_an_engine_without_adapters(folders: list[Path]) -> None:
    """The fused blocks serve steps without adapters; beside one, the unfused ones give the same bits."""
    plain = start_engine(folders[0], {}, **BFLOAT16 | {"max_loras": 0})
    engine = start_engine(folders[0], {"1": folders[1]}, **BFLOAT16)
    request = add(0, None, list(range(5, 30)), max_tokens=8)
    expected = alone(plain, request)
    assert alone(engine, request) == expected
    beside = [uncached(request), add(1, "1", [9] * 20, max_tokens=12)]
    assert bits(run(engine, beside), 0) == expected
    (blocks,) = engine._executor._model.blocks  # type: ignore[attr-defined]
    assert isinstance(blocks, AdaptedBlocks)
    assert [type(block) for block in (*blocks._plain, *blocks._adapted)] == [NativeRun, NativeRun]


@needs_kernels
def test_what_adapters_of_a_small_rank_take_is_in_the_plan(folders: list[Path]) -> None:
    """Ranks are padded to 16, which the plan left out."""
    engine = start_engine(folders[0], {"1": folders[1]}, **BFLOAT16 | {"max_lora_rank": 4})
    adapters: Any = engine._executor._adapters  # type: ignore[attr-defined]
    sites = [getattr(site, "_expander", site) for _, _, site in adapters._sites]
    taken = sum(2 * part.numel() for site in sites for pair in site._kept[1][0] for part in pair)
    assert 0.5 * adapters.num_reserved_bytes < taken <= adapters.num_reserved_bytes
