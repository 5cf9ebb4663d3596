"""What pictures cost a model that sees, beside transformers, and what text costs: `make bench BENCH=pictures`.

    python -m benchmarks.pictures --runs 5 --out benchmarks/results/pictures.json

Random weights of the shapes of SmolVLM-256M in bfloat16, over HTTP. Pictures are noise of 1536 x 1536 pixels, each new,
which become 17 tiles. The second turn of a conversation is answered with the picture and without it. transformers
reads the same pictures in this process, and writes one token.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import datetime
import io
import json
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil, Idefics3Processor

from benchmarks.compare import machine
from benchmarks.compare.servers import running, weft
from benchmarks.compare.workloads import Workload
from benchmarks.long_prompt import latencies, read_stream
from tests.picture_checkpoints import IDEFICS_TEMPLATE, tokenizer

NUM_STREAMS, NUM_STREAM_TOKENS, NUM_TEXT_TOKENS, NUM_ANSWER_TOKENS = 4, 400, 128, 32
VOCAB_SIZE, WIDTH, HEIGHT, TILE = 49_280, 1536, 1536, 512
TEXT = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "image_size": TILE,
}
QUESTION = "what is to be seen here, and what is not? " * 4


def write_model(folder: pathlib.Path) -> tuple[Any, Any]:
    """Write the checkpoint; returns transformers' module and processor."""
    marks = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *marks)
    texts = tokenizer(special, IDEFICS_TEMPLATE)
    ids = {"eos_token_id": texts.eos_token_id, "pad_token_id": texts.pad_token_id}
    config = Idefics3Config(
        vision_config=VISION,
        text_config={**TEXT, **ids, "vocab_size": VOCAB_SIZE},
        scale_factor=4,
        image_token_id=texts.convert_tokens_to_ids("<image>"),
        pad_token_id=texts.pad_token_id,
    )
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 4 * TILE}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(pictures, texts, image_seq_len=64, chat_template=IDEFICS_TEMPLATE)
    torch.manual_seed(0)
    model: Any = Idefics3ForConditionalGeneration(config).eval().bfloat16()
    with torch.no_grad():  # only words are written: what has no text is not sent before it has some
        model.lm_head.weight[[i for i in range(VOCAB_SIZE) if not texts.decode([i]).isalpha()]] = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def noise(seed: int) -> bytes:
    """The file of a picture."""
    areas = np.random.default_rng(seed).integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
    Image.fromarray(areas).resize((WIDTH, HEIGHT)).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


class Bench:
    """A server and what it is asked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(base_url=url, timeout=600)
        self.model = self._client.get("/v1/models").json()["data"][0]["id"]

    def turn(self, messages: list[dict[str, Any]], num_tokens: int = 1) -> tuple[float, int]:
        """Seconds until the whole answer is there, and tokens of the prompt."""
        body = {"model": self.model, "messages": messages, "max_tokens": num_tokens, "temperature": 0}
        began = time.perf_counter()
        answer = self._client.post("/v1/chat/completions", json=body | {"ignore_eos": True}).raise_for_status().json()
        return time.perf_counter() - began, answer["usage"]["prompt_tokens"]

    def conversation(self, picture: bytes | None) -> tuple[float, float, int]:
        """Seconds of the first turn, of one token, and of the second, of some more; and tokens of the first prompt."""
        data = base64.b64encode(picture or b"").decode()
        shown = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}] if picture else []
        first = {"role": "user", "content": [*shown, {"type": "text", "text": f"{time.monotonic_ns()} {QUESTION}"}]}
        said = {"role": "assistant", "content": QUESTION}
        first_s, num_tokens = self.turn([first])
        second = [first, said, {"role": "user", "content": QUESTION}]
        return first_s, self.turn(second, NUM_ANSWER_TOKENS)[0], num_tokens

    def text_speed(self) -> float:
        """Tokens per second of one stream without pictures."""
        asked = [{"role": "user", "content": f"{time.monotonic_ns()}"}]
        return (NUM_TEXT_TOKENS - 1) / (self.turn(asked, NUM_TEXT_TOKENS)[0] - self.turn(asked)[0])

    def longest_gap(self, picture: bytes | None) -> float:
        """Milliseconds that running streams pause at most while a turn with a picture, or without, is answered."""
        return asyncio.run(self._longest_gap(picture))

    async def _longest_gap(self, picture: bytes | None) -> float:
        times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        body = {"model": self.model, "max_tokens": NUM_STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self._url, timeout=600) as client:
            prompts = [{**body, "prompt": [10 + i] * 32} for i in range(NUM_STREAMS)]
            streams = [asyncio.ensure_future(read_stream(client, *pair)) for pair in zip(prompts, times, strict=True)]
            while any(len(stream) < 16 for stream in times):
                await asyncio.sleep(0.01)
            began = time.perf_counter()
            await asyncio.to_thread(self.conversation, picture)
            ended = time.perf_counter()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return latencies(times, began, ended)[-1]


def by_transformers(model: Any, processor: Any, picture: bytes) -> float:
    """Seconds until the first token."""
    began = time.perf_counter()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    made = processor(text=f"<image>{QUESTION}", images=[image], return_tensors="pt")
    made["pixel_values"] = made["pixel_values"].bfloat16()
    with torch.inference_mode():
        model.generate(**made, max_new_tokens=1, do_sample=False)
    return time.perf_counter() - began


ASKED = Workload("pictures", "pictures", "main", 1, 1, 1, 1)


def measure(folder: pathlib.Path, model: Any, processor: Any, runs: int) -> dict[str, list[float]]:
    """By figure; of the two servers in turns, one after another in a round, the first of which does not count."""
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, is_seeing in (("with", "true"), ("without", "false")):
            settings = {"WEFT_PICTURES": is_seeing, "WEFT_SERVER_PROCESSES": "1"}
            server = dataclasses.replace(
                weft({"main": folder}, name, ("--kv-cache-memory", "1GB")), environment=settings
            )
            sides[name] = Bench(stack.enter_context(running(server, [ASKED], folder / f"{name}.log", 300.0)).url)
        for number in track(range(runs + 1), "rounds"):
            bench, pictures = sides["with"], [noise(10 * number + i) for i in range(3)]
            first_s, second_s, num_tokens = bench.conversation(pictures[0])
            _, text_s, num_text_tokens = bench.conversation(None)
            each = {
                "tokens of the picture": float(num_tokens - num_text_tokens),
                "first turn, s": first_s,
                "first turn by transformers, s": by_transformers(model, processor, pictures[1]),
                "second turn, s": second_s,
                "second turn without the picture, s": text_s,
                "longest gap while a picture comes, ms": bench.longest_gap(pictures[2]),
                "longest gap while a text comes, ms": bench.longest_gap(None),
                "text, tok/s": bench.text_speed(),
                "text of a server without pictures, tok/s": sides["without"].text_speed(),
            }
            for name, value in each.items():
                found.setdefault(name, []).extend([value] if number else [])
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="rounds, of which medians are taken (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, help="file for results that are kept")
    options = parser.parse_args()
    machine.refuse_changes(parser, options.out)
    here = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(pathlib.Path(folder), *write_model(pathlib.Path(folder)), options.runs)
    shown = Table("", "median", "all")
    for name, values in found.items():
        shown.add_row(name, f"{statistics.median(values):.3g}", " ".join(f"{value:.3g}" for value in values))
    Console().print(shown)
    if options.out:
        done = {
            "date": datetime.date.today().isoformat(),
            "command": f"make bench BENCH=pictures ARGS={shlex.quote(shlex.join(sys.argv[1:]))}",
            "machine": dataclasses.asdict(here),
            "figures": found,
        }
        options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
