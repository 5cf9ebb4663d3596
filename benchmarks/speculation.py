"""What a predicted output brings: tokens/s of one stream without, with a good and with a useless prediction.

    python -m benchmarks.speculation --model FOLDER --output-tokens 400 --corrupt 0.2 --speculative ngram

An answer is generated; a fifth of its ids, in runs, are replaced at random, which makes the good prediction. The
useless one is random ids. Runs in this process, without HTTP, in turns, and checks that all answers are equal.
"""

import argparse
import logging
import pathlib
import random
import statistics
import time

from weft.engine.loop.engine import Engine
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, Guidance
from weft.engine.wire.params import SamplingParams

MEAN_RUN = 8
"""Ids in a corrupted run, on average."""


def corrupt(ids: list[int], share: float, vocab_size: int, generator: random.Random) -> list[int]:
    """Replace a share of the ids, in runs, by others; a run may become longer or shorter by an id."""
    num_runs = round(len(ids) * share / MEAN_RUN)
    result = list(ids)
    for start_at in sorted(generator.sample(range(0, len(ids) - MEAN_RUN, MEAN_RUN), num_runs), reverse=True):
        length = MEAN_RUN + generator.choice((-1, 0, 1))
        result[start_at : start_at + MEAN_RUN] = [generator.randrange(vocab_size) for _ in range(length)]
    return result


def answer(engine: Engine, prompt: list[int], params: SamplingParams, prediction: list[int]) -> tuple[list[int], float]:
    """The output ids, and tokens/s from the first token on."""
    # A salt of its own keeps the answer before this one out of the prefix cache.
    guidance = Guidance(prediction_token_ids=tuple(prediction))
    salt = str(engine.scheduler.counters.num_steps)
    engine.add(
        0,
        AddRequest(
            TokensInput(prompt),
            params,
            cache_salt=salt,
            guidance=guidance,
            request_id=1,
        ),
    )
    token_ids: list[int] = []
    first_time = 0.0
    while engine.has_work:
        for _, output in engine.step():
            token_ids += output.token_ids
            first_time = first_time or time.perf_counter()
    return token_ids, (len(token_ids) - 1) / (time.perf_counter() - first_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(pathlib.Path(__file__).parents[1] / "server" / "demo_model"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculative", help="ngram, mtp, or the folder of a draft model or head")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--corrupt", type=float, default=0.2, help="share of the prediction that is wrong")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    most = arguments.prompt_tokens + arguments.output_tokens
    options = EngineOptions(
        model=arguments.model, device=arguments.device, max_model_len=most, speculative=arguments.speculative
    )
    started = start(options, "benchmark")
    generator = random.Random(0)
    prompt = [generator.randrange(started.info.vocab_size) for _ in range(arguments.prompt_tokens)]
    params = SamplingParams(
        temperature=arguments.temperature, seed=7, max_tokens=arguments.output_tokens, ignore_eos=True
    )
    expected, _ = answer(started.engine, prompt, params, [])
    predictions = {
        "no prediction": [],
        "good prediction": corrupt(expected, arguments.corrupt, started.info.vocab_size, generator),
        "useless prediction": [generator.randrange(started.info.vocab_size) for _ in expected],
    }
    speeds: dict[str, list[float]] = {name: [] for name in predictions}
    num_steps: dict[str, int] = {}
    for _ in range(arguments.runs):
        for name, prediction in predictions.items():
            before = started.engine.scheduler.counters.num_steps
            token_ids, speed = answer(started.engine, prompt, params, prediction)
            assert token_ids == expected, f"{name} changed the answer"
            speeds[name].append(speed)
            num_steps[name] = started.engine.scheduler.counters.num_steps - before
    print(f"{len(expected)} tokens, {len(set(expected))} different ones")
    for name, values in speeds.items():
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"{name:<20} {statistics.median(values):7.1f} tokens/s, {num_steps[name]} steps (runs: {shown})")


if __name__ == "__main__":
    main()
