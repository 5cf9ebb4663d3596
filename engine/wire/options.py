"""What an engine process is told apart from requests: its options, its LoRA adapters, and what `weft simulate` asks.

The supervisor gives the options. An adapter comes with every request that uses it. `weft simulate` and its engine
process exchange one JSON object per line, over pipes. Imports neither side.
"""

import hashlib
import pathlib
import re
import time
from collections.abc import Collection
from stat import S_ISREG
from typing import Literal

import msgspec

from weft.engine.wire.errors import ModelError

KvRole = Literal["none", "prefill", "decode", "both"]
"""What an engine is among those that share a folder of blocks. Each finds what others wrote, and writes the prompts of
requests that ask for it. One for prefill writes every prompt before its first output. One for decode loads what there
is even if computing it takes less time, since that would delay its streams."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor asks of the engine process; None means that the engine decides.

    Each field but `model` has the value of the setting of that name (`weft.server.settings.engine_options`).

    Attributes:
        model: Local checkpoint folder in Hugging Face layout.
        device: auto, cpu or cuda.
        dtype: auto, bfloat16, float16 or float32.
        max_model_len: Most tokens of prompt and output together.
        kv_cache_memory: Bytes for the KV cache.
        kv_cache_dtype: auto, or fp8 (CUDA) or int8 (CPU) for one byte per value.
        kernels: What computes a component, by its name; what is not named is chosen by measurement.
        prefix_caching: Whether full blocks are indexed by content.
        pin_share: Share of the KV cache, from 0 to 1, that requests may pin.
        load_format: auto, or dummy for random weights.
        model_impl: native for Weft's own layers, transformers for the module of that library, auto for the first if
            there is a family.
        quantization: How plain matrices are kept: none for dtype, int8, int4, or fp8 on CUDA.
        pictures: Whether a model that sees is shown pictures.
        speculative: ngram, mtp for the model's own head, or the folder of a draft model or of an EAGLE-3 head; None for
            none of them.
        itl_target_ms: Milliseconds that 99 of 100 steps stay below while anything decodes; on CUDA at any time.
        deterministic: Whether a request's results must be the same, bit for bit, whatever runs beside it.
        stall_timeout_s: Longest silence in seconds before the engine counts as hanging; 0 means that it never does.
        kv_offload: Bytes of the host's memory for blocks that fall out of the KV cache; 0 for none.
        kv_offload_dir: Folder for these blocks; None for none on disk.
        kv_offload_disk: Bytes that they may take on disk.
        kv_role: none for a folder of its own; prefill, decode or both shares it with other engines, see `KvRole`.
        tensor_parallel_size: Processes that compute each step together, each with a part of every layer.
        pipeline_parallel_size: Stages of so many processes each, one after the other, each with some of the layers.
        nnodes: Machines that compute the model, each with as many of the processes.
        node_rank: Which of them this is; 0 has the engine, the others follow it.
        master_addr, master_port: Where the others find the first; None for no address.
        nodes_token: Secret by which they know each other; None for none.
        kv_events: ZeroMQ address at which to publish what is cached; None for nowhere.
        kv_events_topic: Topic of these messages; None for an empty one.
        kv_events_replay: ZeroMQ address at which to send them again; None for nowhere.
        kv_events_buffer: How many of them are kept for that.
        task: What the model is for: generate, embed or classify; auto as the checkpoint says.
        pooling: Of which hidden states a vector is made: last, mean or cls; auto as the checkpoint says.
        lora: Folders of adapters that are loaded before requests are served, by name.
        max_loras: Adapters that are ready at once; 0 for none.
        max_lora_rank: Largest rank of an adapter.
        lora_modules_to_save: How many of the adapters that are ready at once may have modules of their own.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    kernels: dict[str, str] = {}
    block_size: int | None = None
    prefix_caching: bool = True
    pin_share: float = 0.25
    load_format: Literal["auto", "dummy"] = "auto"
    model_impl: str = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    host_expert_layers: int | None = None
    pictures: bool = False
    speculative: str | None = None
    itl_target_ms: float | None = None
    deterministic: bool = False
    max_num_waiting: int = 1024
    stall_timeout_s: float = 120.0
    log_format: str = "text"
    kv_offload: int = 0
    kv_offload_dir: str | None = None
    kv_offload_disk: int = 32 << 30
    kv_role: KvRole = "none"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    nodes_token: str | None = None
    kv_events: str | None = None
    kv_events_topic: str | None = None
    kv_events_replay: str | None = None
    kv_events_buffer: int = 10_000
    task: str = "auto"
    pooling: str = "auto"
    lora: dict[str, str] = {}
    max_loras: int = 0
    max_lora_rank: int = 64
    lora_modules_to_save: int = 0

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> range:
        """Those of them that this machine has."""
        number = self.num_ranks // self.nnodes
        return range(self.node_rank * number, (self.node_rank + 1) * number)


MAX_ADAPTERS = 1000
"""Most adapters of all models together."""
MAX_LORAS = 256
"""Most slots of a model."""
MAX_FOLDER_CHARS = 4096
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 32 << 20
"""Of the tensors' file, before which come eight bytes with this size: names of some 250,000 tensors. To read them holds
the interpreter's lock."""
ADAPTER_S = 300.0
"""How long the files of an adapter may take to be read."""
_PIECE_BYTES, _OVERLAP_BYTES = 256 << 10, 1 << 10
_OWN_MODULE = re.compile(rb'"(?![^"]*(?:lora_|base_layer))[^"]+\.weight":')
"""In the header, the name of a weight that is part of no low-rank adapter."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: a name, a folder, and what its files held when the name was given to them.

    A server process sends all of it with every request. So an engine needs no table of names, and a new one knows as
    much as the one before it.

    Attributes:
        name: What clients call it.
        folder: Absolute.
        content: A digest of what the files hold, wherever they are. Cached prefixes are those of one content.
        has_modules: Whether it has whole modules of its own, and not A and B alone.
    """

    name: str
    folder: str
    content: str
    has_modules: bool = False


def adapter_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of the adapter in a folder, none of which is opened.

    Raises:
        ModelError: One is missing.
    """
    files = [folder / name for name in _ADAPTER_FILES]
    try:
        for file in files:
            if not S_ISREG(file.stat().st_mode):  # to read a pipe would take for ever
                raise ModelError(f"{file} is no regular file")
    except FileNotFoundError:
        raise ModelError(f"no {file.name} in {folder}" if folder.is_dir() else f"no such folder: {folder}") from None
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero in it
        raise _unreadable(folder, error) from None
    return files


def find_adapter(name: str, folder: pathlib.Path, timeout_s: float = ADAPTER_S) -> Adapter:
    """The adapter in a folder as it is now. Reads its files whole.

    Raises:
        ModelError: There is none, it is larger than the bounds, or its files are not read within timeout_s. On a disk
            that hangs it returns late, or never.
    """
    digest, deadline = hashlib.blake2b(digest_size=16), time.monotonic() + timeout_s
    try:
        config, tensors = adapter_files(folder)
        if (size := config.stat().st_size) > MAX_CONFIG_BYTES:
            raise ModelError(f"{config} must have at most {MAX_CONFIG_BYTES:,} bytes, got {size:,}")
        with tensors.open("rb") as file:
            if (size := int.from_bytes(file.read(8), "little")) > MAX_HEADER_BYTES:
                raise ModelError(f"the header of {tensors} must have at most {MAX_HEADER_BYTES:,} bytes, got {size:,}")
            header = file.read(size)
        for path in (config, tensors):
            digest.update(_digest(path, deadline))
    except TimeoutError:
        raise ModelError(f"{folder}: its files cannot be read within {timeout_s:g} s") from None
    except OSError as error:
        raise _unreadable(folder, error) from None
    ends = (min(start + _PIECE_BYTES + _OVERLAP_BYTES, size) for start in range(0, size, _PIECE_BYTES))
    pieces = zip(range(0, size, _PIECE_BYTES), ends, strict=True)  # others get a turn between them
    has_modules = any(_OWN_MODULE.search(header, start, end) for start, end in pieces)
    return Adapter(name, str(folder), digest.hexdigest(), has_modules)


def read_through(folder: pathlib.Path) -> None:
    """Read the files of an adapter once: what reads them next does not wait for the disk.

    Raises:
        ModelError: One is missing, or they are not read within ADAPTER_S.
    """
    deadline = time.monotonic() + ADAPTER_S
    try:
        for path in adapter_files(folder):
            with path.open("rb", buffering=0) as file:
                while file.read(_PIECE_BYTES) and time.monotonic() <= deadline:
                    pass
    except OSError as error:
        raise _unreadable(folder, error) from None
    if time.monotonic() > deadline:
        raise ModelError(f"{folder}: its files cannot be read within {ADAPTER_S:g} s")


def _digest(path: pathlib.Path, deadline: float) -> bytes:
    """The digest of a file. Raises TimeoutError after the deadline."""
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            if time.monotonic() > deadline:
                raise TimeoutError
    return digest.digest()


def _unreadable(folder: pathlib.Path, error: Exception) -> ModelError:
    return ModelError(f"{folder} cannot be read: {getattr(error, 'strerror', None) or error}")


class AdapterUse(msgspec.Struct, frozen=True):
    """Names of adapters, sorted: of requests that run, of those that wait, and of what is in the slots."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()

    def pack(self, size: int) -> bytes:
        """The names in at most size bytes. Each list is cut between two names if it takes more than a third."""
        lists = (self.running, self.waiting, self.resident)
        return b"\n".join(_joined(names, size // 3 - 1) for names in lists)


def unpack(data: bytes) -> AdapterUse:
    """What `AdapterUse.pack` made; zeros behind it are ignored. Of half-written bytes, whatever they say."""
    lists = data.partition(b"\0")[0].decode("utf-8", "replace").split("\n")
    return AdapterUse(*(tuple(filter(None, names.split(","))) for names in lists[:3]))


def _joined(names: Collection[str], size: int) -> bytes:
    """Names with commas between them."""
    data = ",".join(names).encode()
    return data if len(data) <= size else data[: size + 1].rpartition(b",")[0]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What steps cost with certain options on a certain machine, and what else a simulated engine has to know.

    Attributes:
        seconds: Of a step, and of one token, KV token and pair of query and context more in it (`StepCostModel`).
        median_error: Of the prediction, relative to the measured steps.
        windows: Sliding window of each cache group of blocks; None for one that sees all.
        num_state_groups: Cache groups of states.
    """

    options: EngineOptions
    device: str
    seconds: list[float]
    median_error: float
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_states: int
    windows: list[int | None]
    num_state_groups: int
    itl_target_s: float | None
    overlap: bool


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Forget what ran, and begin at zero seconds with so many empty replicas; no answer."""

    num_replicas: int


class Arrive(msgspec.Struct, tag="arrive", frozen=True):
    """A request reaches a replica, not before any other that was told; no answer.

    Attributes:
        hash_ids: Equal ids at the beginning of two prompts are equal blocks of `hash_tokens` tokens.
    """

    replica: int
    time: float
    num_tokens: int
    output_tokens: int
    hash_ids: list[int]
    hash_tokens: int


class Look(msgspec.Struct, tag="look", frozen=True):
    """Ask how all replicas are at a time; answered by a list of `Load`."""

    time: float


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """Let all requests end; answered by `Finished`."""


ToSimulation = Begin | Arrive | Look | Finish


class Load(msgspec.Struct, array_like=True, frozen=True):
    """How a replica is."""

    running: int
    waiting: int
    kv_usage: float


class Finished(msgspec.Struct, frozen=True):
    """What became of all requests that arrived.

    Attributes:
        first_token_s: Seconds from arrival to the first token, of each that was answered, in the order of arrival.
        gaps_s: Seconds from one token of a request to its next, of all.
        prompt_tokens: Of those that were answered.
        cached_tokens: Those of them that were found in the cache.
        busy_s: Seconds that the replicas computed, in all.
        end_s: When the last token came.
        refused: Faults, with how many requests were refused for each.
    """

    first_token_s: list[float]
    gaps_s: list[float]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    busy_s: float
    end_s: float
    refused: dict[str, int]
