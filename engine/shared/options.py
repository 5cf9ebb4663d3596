"""What the supervisor asks of the engine process."""

from typing import Literal

import msgspec

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
        kernels: What computes a component, by its name; what is not named is settled by measurement.
        prefix_caching: Whether full blocks are indexed by content.
        pin_share: Share of the KV cache, from 0 to 1, that requests may pin.
        load_format: auto, or dummy for random weights.
        model_impl: native for Weft's own layers, transformers for the module of that library, auto for the first if
            there is a family.
        quantization: How plain matrices are kept: none for dtype, int8, int4, or fp8 on CUDA.
        speculative: ngram, or the folder of a draft model; None for neither.
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
