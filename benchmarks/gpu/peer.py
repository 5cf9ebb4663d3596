"""transformers' continuous batching over the same model, the same load, on the same device, without HTTP.

Its warm-up does not count: the clock runs from the first request that leaves the queue to the last that is finished.
"""

import random

from benchmarks.gpu.job import Job, Reporter, UnavailableError
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.over_http import NUM_ROUNDS


def run(job: Job, reporter: Reporter) -> None:
    """Measure.

    Raises:
        UnavailableError: transformers is not installed, has no `generate_batch`, or finished too few requests.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    except ImportError as error:
        raise UnavailableError(f"transformers cannot be imported: {error}") from error
    sizes = job.sizes
    reporter.progress("loading transformers")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder(job.scratch, sizes.small))
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if not hasattr(model, "generate_batch"):
        raise UnavailableError("this transformers has no generate_batch")
    generator = random.Random(0)
    prompts = [generator.choices(range(config.vocab_size), k=sizes.input_tokens) for _ in range(_number(job))]
    # On a CPU it would take most of the machine's memory for its cache.
    cache = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256) if job.device == "cpu" else None
    generation = GenerationConfig(
        max_new_tokens=sizes.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    reporter.progress(f"transformers: {len(prompts)} requests")
    results = model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=cache, progress_bar=False
    )
    outputs = list(results.values())
    lengths = [len(output.generated_tokens) for output in outputs]
    if lengths != [sizes.output_tokens] * len(prompts):
        raise UnavailableError(f"generate_batch made {sum(lengths)} tokens of {len(prompts) * sizes.output_tokens}")
    begin = min(output.lifespan[0] for output in outputs)
    end = max(output.lifespan[1] for output in outputs)
    reporter.measured("peer", sum(lengths) / (end - begin), duration_s=end - begin, num_requests=len(prompts))


def _number(job: Job) -> int:
    """As many requests as the clients of Weft send."""
    return NUM_ROUNDS * job.sizes.at_once
