"""The attention of a prefill alone: Weft's over its paged cache, beside torch's FlashAttention 2 over plain K/V.

K/V are in Weft's cache already, whose time has the reading through block tables in it; torch's has not.
"""

import torch

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.job import Job, Reporter, UnavailableError
from benchmarks.gpu.models import model_folder
from weft.engine import config as engine_config
from weft.engine.cache.specs import CacheGroup
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.choice import choose_kernels, make_backend
from weft.engine.parts.decoder import decoder_spec
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.wire.messages import EngineOptions


def run(job: Job, reporter: Reporter) -> None:
    """Measure one layer of the large model.

    Raises:
        UnavailableError: There is no CUDA device.
    """
    if job.device != "cuda":
        raise UnavailableError("both are for CUDA")
    reporter.progress("attention")
    num_prompts, length = job.sizes.prefill
    num_tokens = num_prompts * length
    folder = model_folder(job.scratch, job.sizes.large)
    model = load_model_config(folder)
    options = EngineOptions(model=str(folder), device="cuda", max_num_batched_tokens=num_tokens)
    config = engine_config.resolve(options, model)
    spec = decoder_spec(model).blocks[0].caches[0]
    batch = dummy_batch(num_tokens, (spec,), config.block_size, 1, length)
    num_blocks = int(batch.groups[0].block_tables.max()) + 1
    backend = make_backend((CacheGroup(spec, (0,)),), num_blocks, config, model.num_heads)
    sizes = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    qkv = torch.randn(num_tokens, sum(sizes), model.head_dim, device="cuda").to(config.dtype)
    starts = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device="cuda")
    pairs = num_prompts * length * (length + 1) / 2
    work = {"matrix_flops_per_s": 4 * model.num_heads * model.head_dim * pairs}
    with torch.inference_mode():
        step = backend.begin(batch)
        rotation = torch.tensor([1.0, 0.0], device="cuda")[:, None, None].expand(num_tokens, 2, 1, model.head_dim)
        heads = choose_kernels(model, config).heads(None, model.num_heads, model.num_kv_heads)
        parts = heads(qkv, rotation.to(config.dtype).contiguous(), step.cache(0))  # turned by no angle
        own_s = seconds(lambda: step.attend(0, parts), config.device)
        reporter.measured("attention", own_s * 1e3, work, backend=backend.name)
        flash = torch.ops.aten._flash_attention_forward
        torch_s = seconds(lambda: flash(*parts, starts, starts, length, length, 0.0, True, False), config.device)
        reporter.measured("attention-torch", torch_s * 1e3, work)
        found, expected = step.attend(0, parts), flash(*parts, starts, starts, length, length, 0.0, True, False)[0]
        reporter.note("attention, largest difference", float((found - expected).abs().max()))
