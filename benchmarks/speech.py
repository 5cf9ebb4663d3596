"""Speech to text by Weft over HTTP, beside transformers and faster-whisper: `make bench BENCH=speech`.

    python -m benchmarks.speech --faster-whisper ~/peers/faster-whisper/bin/python --out benchmarks/results/speech.json

`make real` fetches the model, a real Whisper base, and espeak-ng speaks the sentences. Each side writes them greedily,
in English: half of them one after another, then all 16 at once. transformers gets these as one batch, faster-whisper
one by one, since its batches are the windows of one file. All take turns. Before each round every sound gets some
silence in front, so that nothing is known from before. Weft computes in bfloat16, faster-whisper in float32 and in
int8, transformers in float32, in which it is fastest where the CPU has no bfloat16. faster-whisper runs in an
interpreter of its own.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer, WhisperFeatureExtractor

from benchmarks.compare import machine, servers
from benchmarks.compare.workloads import Workload
from tests.real.fetch import default_folder
from tests.real.whisper import RATE, SENTENCES, samples_of, spoken, word_errors, write_checkpoint

START_S = 300.0
WORK = Workload("S", "speech", "whisper", 1, 1, 1, 0)
NUM_ALONE = len(SENTENCES) // 2
Writes = Callable[[Sequence[pathlib.Path], bool], list[str]]
"""The texts of files, one after another or all at once."""

CHILD = """
import sys, json
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type=sys.argv[2], cpu_threads=int(sys.argv[3]))
for line in sys.stdin:
    texts = []
    for path in json.loads(line):
        segments, _ = model.transcribe(path, language="en", beam_size=1)
        texts.append("".join(each.text for each in segments))
    print(json.dumps(texts), flush=True)
"""


@contextlib.contextmanager
def weft(folder: pathlib.Path, flags: Sequence[str]) -> Iterator[Writes]:
    """A server, and what asks it."""
    server = servers.weft({"whisper": folder}, flags=flags)
    with (
        servers.running(server, [WORK], pathlib.Path(tempfile.gettempdir(), "weft-speech.log"), START_S) as running,
        httpx.Client(base_url=running.url, timeout=START_S) as client,
        ThreadPoolExecutor(len(SENTENCES)) as threads,
    ):

        def text(path: pathlib.Path) -> str:
            files, data = {"file": path.read_bytes()}, {"language": "en", "response_format": "verbose_json"}
            return str(
                client.post("/v1/audio/transcriptions", files=files, data=data).raise_for_status().json()["text"]
            )

        yield lambda paths, at_once: list(threads.map(text, paths) if at_once else map(text, paths))


def transformers(model: Any, folder: pathlib.Path) -> Writes:
    """`generate`, with times, as the others write them too."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    extractor = WhisperFeatureExtractor()

    def texts(paths: Sequence[pathlib.Path]) -> list[str]:
        sounds = [samples_of(path) for path in paths]
        made = extractor(sounds, sampling_rate=RATE, return_tensors="pt")["input_features"]
        with torch.no_grad():
            found = model.generate(made, return_timestamps=True, task="transcribe", language="en")
        return [str(text) for text in tokenizer.batch_decode(found, skip_special_tokens=True)]

    return lambda paths, at_once: texts(paths) if at_once else [texts([path])[0] for path in paths]


@contextlib.contextmanager
def faster_whisper(python: pathlib.Path, folder: pathlib.Path, kind: str, num_threads: int) -> Iterator[Writes]:
    """A process of that interpreter."""
    command = [str(python), "-c", CHILD, str(folder), kind, str(num_threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None

        def texts(paths: Sequence[pathlib.Path], at_once: bool) -> list[str]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
            return list(json.loads(process.stdout.readline()))

        yield texts
        process.stdin.close()


def delayed(path: pathlib.Path, number: int) -> pathlib.Path:
    """The same file with so many hundredths of a second of silence in front."""
    target = path.with_suffix(f".{number}.wav")
    with wave.open(str(path)) as source, wave.open(str(target), "wb") as made:
        made.setparams(source.getparams())
        silence = np.zeros(source.getframerate() // 100 * number, np.int16)
        made.writeframes(silence.tobytes() + source.readframes(source.getnframes()))
    return target


def measure(sides: dict[str, Writes], files: Sequence[pathlib.Path], runs: int) -> dict[str, Any]:
    """Seconds of each side for each way, by round, and the words that it got wrong; the first round does not count."""
    found: dict[str, Any] = {name: {"1": [], "16": [], "wrong": 0, "words": 0} for name in sides}
    for number in track(range(runs + 1), "rounds"):
        sounds = [delayed(path, number) for path in files]
        for name, texts in sides.items():
            began = time.perf_counter()
            texts(sounds[:NUM_ALONE], False)
            alone = time.perf_counter()
            written = texts([delayed(path, number + 50) for path in files], True)
            if number:
                found[name]["1"].append((alone - began) / NUM_ALONE)
                found[name]["16"].append(time.perf_counter() - alone)
                for said, each in zip(SENTENCES, written, strict=True):
                    wrong, words = word_errors(said, each)
                    found[name]["wrong"] += wrong
                    found[name]["words"] += words
    return found


def table(found: dict[str, Any]) -> Table:
    """Medians."""
    shown = Table("", "one", "16 at once", "words wrong")
    for name, each in found.items():
        one, many = (statistics.median(each[key]) for key in ("1", "16"))
        shown.add_row(name, f"{one:.2f} s", f"{many:.2f} s", f"{each['wrong'] / each['words']:.1%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.speech", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faster-whisper", type=pathlib.Path, metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--out", type=pathlib.Path, help="a file for the figures; the tree must be of a commit")
    options, facts = parser.parse_args(), machine.describe()
    machine.refuse_changes(parser, options.out)
    original = default_folder() / "whisper-base"
    if not original.is_dir():
        raise SystemExit(f"no {original}: `python -m tests.real.fetch whisper` fetches it")
    os.environ.pop("WEFT_REAL", None)  # to the server, no setting of its own
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = pathlib.Path(scratch, "whisper-base")
        model = write_checkpoint(original, folder)
        torch.set_num_threads(facts.num_cores)
        sides: dict[str, Writes] = {
            "Weft": stack.enter_context(weft(folder, ("--dtype", "bfloat16"))),
            "transformers": transformers(model, folder),
        }
        if options.faster_whisper:
            for kind in ("float32", "int8"):
                started = faster_whisper(options.faster_whisper, original, kind, facts.num_cores)
                sides[f"faster-whisper, {kind}"] = stack.enter_context(started)
        files = [spoken(sentence, pathlib.Path(scratch)) for sentence in SENTENCES]
        found = measure(sides, files, options.runs)
    Console().print(table(found))
    if options.out:
        report = {"machine": dataclasses.asdict(facts), "runs": options.runs, "sides": found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
