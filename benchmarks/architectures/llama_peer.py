"""llama.cpp's decode steps of the same shapes: run with an interpreter that has llama-cpp-python and gguf.

    PYTHON benchmarks/architectures/llama_peer.py build/bench/architectures/experts/config.json STREAMS TOKENS

Writes random weights beside the configuration, unless it is a GGUF file itself, loads them, and answers lines "streams
context steps" on standard input with the milliseconds of a step; of 0 streams, with those of the first token of a
prompt as long as the context. Needs nothing of Weft.
"""

import ctypes
import json
import os
import pathlib
import sys
import time
from typing import Any

import gguf
import llama_cpp
import numpy as np

ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "falcon_h1": "falcon-h1",
}
POOL = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02).view(np.uint32) >> 16


def settings(c: dict[str, Any]) -> dict[str, Any]:
    """Keys of the file, from a configuration; those that are not there are left out."""
    heads, kv_heads, layers = c["num_attention_heads"], c["num_key_value_heads"], c["num_hidden_layers"]
    is_latent = "kv_lora_rank" in c
    values = {
        "vocab_size": c["vocab_size"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": layers,
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if is_latent else kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": c.get("sliding_window"),
        "rope.freq_base": c["rope_theta"],
        "expert_count": c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts"),
        "expert_used_count": c.get("num_experts_per_tok"),
        "expert_feed_forward_length": expert_size(c),
        "leading_dense_block_count": c.get("first_k_dense_replace"),
        "expert_shared_count": c.get("n_shared_experts"),
        "expert_weights_scale": c.get("routed_scaling_factor"),
        "ssm.inner_size": c.get("mamba_d_ssm"),
        "ssm.state_size": c.get("mamba_d_state"),
        "ssm.time_step_rank": c.get("mamba_n_heads"),
        "ssm.group_count": c.get("mamba_n_groups"),
        "ssm.conv_kernel": 4 if "mamba_d_ssm" in c else None,
        "attention.q_lora_rank": c.get("q_lora_rank"),
        "attention.kv_lora_rank": c.get("kv_lora_rank"),
    }
    if is_latent:
        key = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        values |= {"attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"]}
        values |= {"attention.value_length": c["kv_lora_rank"], "rope.dimension_count": c["qk_rope_head_dim"]}
        values |= {"attention.key_length_mla": key, "attention.value_length_mla": c["v_head_dim"]}
        values |= {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}
        values |= {"expert_gating_func": 2, "expert_weights_norm": True}
    else:
        values |= dict.fromkeys(("attention.key_length", "attention.value_length"), c["head_dim"])
        values |= {"rope.dimension_count": c["head_dim"]}
    return {key: value for key, value in values.items() if value is not None}


def expert_size(c: dict[str, Any]) -> int | None:
    """Inner size of an expert."""
    return c.get("moe_intermediate_size") or (c["intermediate_size"] if "num_local_experts" in c else None)


def tensors(c: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer by their names, outputs first; those of one dimension are float32."""
    hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    kind, inner, dim = ARCHITECTURES[c["model_type"]], c["intermediate_size"], c.get("head_dim", 0)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
    if kind == "deepseek2":
        q, kv, nope, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        shapes |= {"attn_q_a.weight": (q, hidden), "attn_q_a_norm.weight": (q,), "attn_kv_a_norm.weight": (kv,)}
        shapes |= {"attn_q_b.weight": (heads * (nope + rope), q), "attn_kv_a_mqa.weight": (kv + rope, hidden)}
        shapes |= {"attn_k_b.weight": (heads, kv, nope), "attn_v_b.weight": (heads, c["v_head_dim"], kv)}
        shapes |= {"attn_output.weight": (hidden, heads * c["v_head_dim"])}
    else:
        sizes = {"attn_q": heads * dim, "attn_k": kv_heads * dim, "attn_v": kv_heads * dim}
        shapes |= {f"{name}.weight": (size, hidden) for name, size in sizes.items()}
        shapes |= {"attn_output.weight": (hidden, heads * dim)}
    if kind == "gpt-oss":
        shapes |= {f"{name}.bias": (size,) for name, size in sizes.items()} | {"attn_output.bias": (hidden,)}
        shapes |= {"attn_sinks.weight": (heads,), "ffn_gate_inp.bias": (c["num_local_experts"],)}
        shapes |= {f"ffn_{n}_exps.bias": (c["num_local_experts"], inner) for n in ("gate", "up")}
        shapes |= {"ffn_down_exps.bias": (c["num_local_experts"], hidden)}
    if kind.startswith("qwen3"):
        shapes |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    if kind == "falcon-h1":
        width, num = c["mamba_d_ssm"], c["mamba_n_heads"]
        channels = width + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
        shapes |= {"ssm_in.weight": (width + channels + num, hidden), "ssm_out.weight": (hidden, width)}
        shapes |= {"ssm_conv1d.weight": (channels, 4), "ssm_conv1d.bias": (channels,), "ssm_dt.bias": (num,)}
        shapes |= {"ssm_a": (num, 1), "ssm_d": (num, 1)}
    norm = {"gpt-oss": "post_attention_norm.weight", "falcon-h1": "ffn_norm"}.get(kind, "ffn_norm.weight")
    shapes |= {norm: (hidden,)}
    num_experts = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    if num_experts and layer >= c.get("first_k_dense_replace", 0):
        size = expert_size(c)
        shapes |= {f"ffn_{name}_exps.weight": (num_experts, size, hidden) for name in ("gate", "up")}
        shapes |= {"ffn_down_exps.weight": (num_experts, hidden, size), "ffn_gate_inp.weight": (num_experts, hidden)}
        if shared := c.get("n_shared_experts"):
            shapes |= {f"ffn_{name}_shexp.weight": (shared * size, hidden) for name in ("gate", "up")}
            shapes |= {"ffn_down_shexp.weight": (hidden, shared * size)}
    else:
        shapes |= {"ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden)}
        shapes |= {"ffn_down.weight": (hidden, inner)}
    return shapes


def write(config: pathlib.Path) -> pathlib.Path:
    """Write a file of random weights in bfloat16."""
    c, file = json.loads(config.read_text()), config.with_name("random.gguf")
    writer = gguf.GGUFWriter(str(file), ARCHITECTURES[c["model_type"]])
    for key, value in settings(c).items():
        add = {bool: writer.add_bool, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{ARCHITECTURES[c['model_type']]}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    head = (c["vocab_size"], c["hidden_size"])
    shapes = {"token_embd.weight": head, "output.weight": head, "output_norm.weight": (c["hidden_size"],)}
    for layer in range(c["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in tensors(c, layer).items()}
    for name, shape in shapes.items():
        if len(shape) == 1 or name.endswith((".bias", "ssm_a", "ssm_d", "conv1d.weight", "gate_inp.weight")):
            sign = -1 if name.endswith("ssm_a") else 1
            values = np.full(shape, sign * 0.5, np.float32)
            if name.endswith("gate_inp.weight"):  # equal rows would send all tokens to the same experts
                values = (POOL << 16)[: values.size].view(np.float32).reshape(shape)
            writer.add_tensor(name, values)
        else:
            values = np.resize(POOL.astype(np.uint16), shape).view(np.uint8)
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Steps:
    """A loaded model whose streams decode."""

    def __init__(self, file: pathlib.Path, num_streams: int, num_tokens: int) -> None:
        """Load it, with room for so many tokens of each stream."""
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = num_streams * num_tokens, num_streams
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._model or not self._context:
            raise RuntimeError("llama.cpp does not load it")
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._lengths: list[int] = []

    def reach(self, num_streams: int, num_prompt: int) -> None:
        """Compute prompts until there are so many streams."""
        generator = np.random.default_rng(num_streams)
        for stream in range(len(self._lengths), num_streams):
            ids = generator.integers(2, self._vocab_size, num_prompt)
            for first in range(0, num_prompt, 512):
                part = ids[first : first + 512]
                self._decode([(int(one), first + index, stream) for index, one in enumerate(part)], num_logits=1)
            self._lengths.append(num_prompt)

    def time(self, num_steps: int) -> float:
        """Seconds of a step, the greedy choice of ids included."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            ids = []
            for row in range(len(self._lengths)):
                logits = llama_cpp.llama_get_logits_ith(self._context, row - len(self._lengths))
                ids.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
            rows = [(one, self._lengths[stream], stream) for stream, one in enumerate(ids)]
            self._decode(rows, num_logits=len(rows))
            self._lengths = [length + 1 for length in self._lengths]
        return (time.perf_counter() - begin) / num_steps

    def first_token(self, num_prompt: int) -> float:
        """Seconds of a prompt and the greedy choice of its first token; its stream ends."""
        generator = np.random.default_rng(num_prompt)
        begin, stream = time.perf_counter(), len(self._lengths)
        ids = generator.integers(2, self._vocab_size, num_prompt)
        for first in range(0, num_prompt, 512):
            part = ids[first : first + 512]
            self._decode([(int(one), first + index, stream) for index, one in enumerate(part)], num_logits=1)
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()
        seconds = time.perf_counter() - begin
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), stream, -1, -1)
        return seconds

    def _decode(self, rows: list[tuple[int, int, int]], num_logits: int) -> None:
        """Rows of id, position and stream; the last num_logits get logits."""
        self._batch.n_tokens = len(rows)
        for index, (one, position, stream) in enumerate(rows):
            self._batch.token[index], self._batch.pos[index], self._batch.n_seq_id[index] = one, position, 1
            self._batch.seq_id[index][0] = stream
            self._batch.logits[index] = index >= len(rows) - num_logits
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode: {status}")


def main() -> None:
    """Answer the lines of standard input."""
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    given = pathlib.Path(sys.argv[1])
    steps = Steps(given if given.suffix == ".gguf" else write(given), int(sys.argv[2]), int(sys.argv[3]))
    print("ready", flush=True)
    for line in sys.stdin:
        num_streams, num_prompt, num_steps = map(int, line.split())
        if not num_streams:
            print(steps.first_token(num_prompt) * 1e3, flush=True)
            continue
        steps.reach(num_streams, num_prompt)
        if num_streams > 1:  # the logits of all streams
            steps._decode([(2, length, stream) for stream, length in enumerate(steps._lengths)], num_streams)
            steps._lengths = [length + 1 for length in steps._lengths]
        print(steps.time(num_steps) * 1e3, flush=True)


if __name__ == "__main__":
    main()
