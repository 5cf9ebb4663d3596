"""Prints how much memory a model takes and how many requests it serves, before anything is loaded.

Run by `weft plan`, with the options on standard input. Exit code 2: the model does not fit or cannot
be read, and one line on stderr says why.
"""

import pathlib
import sys

import msgspec

from weft.engine.cache.specs import group_layers
from weft.engine.run import config as engine_config
from weft.engine.run.draft_checkpoint import find_draft_checkpoint
from weft.engine.run.memory_plan import check_fit, estimate_activations_bytes, format_size, make_plan
from weft.engine.run.model_choice import plan_model, read_model, weights_note
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import EngineOptions


def main() -> int:
    """Print the plan for the options on standard input."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineOptions)
    try:
        model = read_model(pathlib.Path(options.model), options.model_impl)
        config = engine_config.resolve(options, model)
        chosen = plan_model(model, config)
        weights_bytes = chosen.weights_bytes
        activations_bytes = estimate_activations_bytes(model, config, chosen.cache_specs)
        groups = group_layers(chosen.cache_specs)
        draft = find_draft_checkpoint(config, model.vocab_size, chosen)
        if draft:
            weights_bytes += draft.plan.weights_bytes
            activations_bytes = max(activations_bytes, draft.activations_bytes)
            groups += draft.groups
        free_bytes = engine_config.free_bytes(config)
        check_fit(weights_bytes=weights_bytes, activations_bytes=activations_bytes, free_bytes=free_bytes)
        plan = make_plan(
            config,
            groups,
            weights_bytes=weights_bytes,
            activations_bytes=activations_bytes,
            free_bytes=free_bytes - weights_bytes - activations_bytes,
        )
    except ModelError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return 2
    dtype = str(config.dtype).removeprefix("torch.")
    print(f"model        {config.model.name} ({model.architecture}; layers: {chosen.name})")
    exceptions = (
        f", matrices in {options.quantization}" * (options.quantization != "none")
        + ", KV cache in fp8" * config.is_kv_cache_fp8
    )
    print(f"device       {config.device.type}, {dtype}{exceptions}")
    if note := weights_note(model, config, chosen.kit):
        print(f"weights are  {note}")
    if draft and config.draft_model:
        print(f"draft model  {config.draft_model.name} ({draft.config.architecture})")
    if options.tensor_parallel_size > 1:
        print(f"ranks        {options.tensor_parallel_size}; what follows is for each of them")
    print(f"free memory  {format_size(free_bytes)}")
    print("\n".join(plan.lines()))
    print(plan.concurrency())
    return 0


if __name__ == "__main__":
    sys.exit(main())
