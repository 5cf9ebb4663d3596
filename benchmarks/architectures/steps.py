"""Decode steps of the real engine, stepped by hand, and how fast this machine reads memory meanwhile."""

import pathlib
import random
import subprocess
import time

import torch

from benchmarks.compare import machine
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.library import load
from weft.engine.kernels.cpu.products import NativeExperts
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams

_PROBE = 16_384, 8192  # a matrix of 256 MiB, more than any cache
_ROOM = 4096  # tokens that a stream may make: more than all windows


class Bandwidth:
    """Bytes per second that this machine reads: the better of a plain read and of a product with one row."""

    def __init__(self) -> None:
        """Make the matrix of the product."""
        library = load()
        assert library is not None, "Weft has no kernels for this machine"
        self._matrix = NativeLinear(library, torch.ones(_PROBE, dtype=torch.bfloat16), None)
        self._row = torch.ones(1, _PROBE[1], dtype=torch.bfloat16)

    def measure(self) -> tuple[float, float]:
        """Bytes per second of the plain read, and of the product."""
        return machine.read_bandwidth(1 << 28, 4), self.product(1)

    def product(self, num_rows: int) -> float:
        """The same of a product with so many rows: arithmetic may take longer than reading."""
        inputs, times = self._row.repeat(num_rows, 1), []
        for _ in range(8):
            begin = time.perf_counter()
            self._matrix(inputs)
            times.append(time.perf_counter() - begin)
        return 2 * _PROBE[0] * _PROBE[1] / min(times)


class Steps:
    """An engine with random weights whose streams decode; each has a prompt of its own."""

    def __init__(
        self, folder: pathlib.Path, vocab_size: int, context: int, num_streams: int, load_format: str = "dummy"
    ) -> None:
        """Start it; load_format as in the settings."""
        self._vocab_size, self._context = vocab_size, context
        options = EngineOptions(
            model=str(folder),
            device="cpu",
            load_format=load_format,
            max_model_len=context + _ROOM,
            max_num_seqs=num_streams,
            prefix_caching=False,
            itl_target_ms=60_000.0,  # prompts need not wait for each other's decodes here
        )
        self._engine = start(options, "benchmark").engine
        self._random, self._num_streams = random.Random(0), 0

    def reach(self, num_streams: int) -> None:
        """Add streams until there are so many, and let them decode."""
        for number in range(self._num_streams, num_streams):
            prompt = self._random.choices(range(2, self._vocab_size), k=self._context)
            params = SamplingParams(temperature=0.0, max_tokens=_ROOM, ignore_eos=True)
            self._engine.add(0, AddRequest(TokensInput(prompt), params, request_id=number))
        seen: set[int] = set()
        while len(seen) < num_streams - self._num_streams:
            seen |= {output.request_id for _, output in self._engine.step() if output.request_id >= self._num_streams}
        self._num_streams = num_streams
        self.time(8)

    def first_token(self) -> float:
        """Seconds to the first token of a prompt, while no other stream runs; its stream ends."""
        assert not self._num_streams
        prompt = self._random.choices(range(2, self._vocab_size), k=self._context)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        begin = time.perf_counter()
        self._engine.add(0, AddRequest(TokensInput(prompt), params, request_id=_ROOM))
        while not self._engine.step():
            pass
        return time.perf_counter() - begin

    def time(self, num_steps: int) -> float:
        """Seconds of a decode step, the mean of so many."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        return (time.perf_counter() - begin) / num_steps

    def num_tokens(self) -> list[int]:
        """Tokens of each stream now."""
        return [request.num_tokens for request in self._engine.scheduler.running]

    def count_experts(self) -> int:
        """Experts that have rows in a step, of all layers together."""
        counts, add_to = [], NativeExperts.add_to

        def counted(
            experts: NativeExperts,
            residual: torch.Tensor,
            inputs: torch.Tensor,
            ids: torch.Tensor,
            shares: torch.Tensor,
        ) -> None:
            counts.append(len(ids.unique()))
            add_to(experts, residual, inputs, ids, shares)

        NativeExperts.add_to = counted  # type: ignore[method-assign]
        try:
            self._engine.step()
        finally:
            NativeExperts.add_to = add_to  # type: ignore[method-assign]
        return sum(counts)


class Peer:
    """llama.cpp in a process of its own, see llama_peer.py, with streams of the same lengths."""

    def __init__(self, python: pathlib.Path, model: pathlib.Path, num_streams: int, context: int) -> None:
        """Start it with a GGUF file, or a config.json; it loads while this waits."""
        program = pathlib.Path(__file__).with_name("llama_peer.py")
        sizes = str(num_streams), str(context + 256)
        command = [str(python), str(program), str(model), *sizes]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._context = context
        self._read()

    def time(self, num_streams: int, num_steps: int) -> float:
        """Milliseconds of a step, the mean of so many."""
        assert self._process.stdin
        print(num_streams, self._context, num_steps, file=self._process.stdin, flush=True)
        return float(self._read())

    def first_token(self) -> float:
        """Milliseconds to the first token of a prompt."""
        return self.time(0, 0)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("llama.cpp's process ended")
        return line
