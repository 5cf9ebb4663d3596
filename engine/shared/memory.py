"""What a model takes of a device's memory, and the share of it that KV caches may have."""

import msgspec

# KV caches take at most this share of the memory that weights and activations leave, unless told otherwise. The rest is
# for other programs on a CPU, and for CUDA graphs and fragmentation on a GPU.
SHARE_OF_FREE_MEMORY = {"cpu": 0.4, "cuda": 0.92}

# A CPU decodes too slowly to use more.
MAX_CPU_CACHE_BYTES = 4 << 30


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A model on its device, before it is loaded. On a CPU these are the bytes of all ranks together.

    Attributes:
        fault: Why no plan can be made; the other fields then say nothing.
        device: cpu or cuda.
        num_sharing: Ranks that share the device; each has its part of every number of bytes.
        free_bytes: What the device had to give when this was planned.
        process_bytes: Taken by an engine process itself.
        least_kv_bytes: A KV cache with which the model can be served.
        kv_bytes: The KV cache of the model alone on its device, or what the options say.
        is_kv_fixed: Whether the options say it.
        num_requests: Requests of max_model_len that run at once with kv_bytes.
    """

    fault: str = ""
    device: str = "cpu"
    num_sharing: int = 1
    free_bytes: int = 0
    process_bytes: int = 0
    weights_bytes: int = 0
    activations_bytes: int = 0
    least_kv_bytes: int = 0
    kv_bytes: int = 0
    is_kv_fixed: bool = False
    max_model_len: int = 0
    num_requests: int = 0


def cache_bytes(left_bytes: int, device: str) -> int:
    """Bytes for KV caches, of those that weights and activations leave on a device."""
    share = int(left_bytes * SHARE_OF_FREE_MEMORY[device])
    return min(share, MAX_CPU_CACHE_BYTES) if device == "cpu" else share


def format_size(num_bytes: float) -> str:
    """A printable size, such as 1.2 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"
