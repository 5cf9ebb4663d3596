"""A fake engine that hears, a Whisper checkpoint without weights, and sound."""

import json
import math
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.server.conftest import EOS, Asked, ByteTokenizer, FakeEngine, FakeGeneration, Site
from weft.engine.wire.inputs import AudioInput, AudioShape, InputLimits
from weft.engine.wire.messages import AddRequest, FinishReason, TokenLogprobs, TokensOutput
from weft.engine.wire.params import PooledOutput
from weft.server.app.app import create_app
from weft.server.models.served_model import served_model
from weft.server.settings import Settings

START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE, NO_TIMES, TIME = range(258, 267)
"""TIME is that of time 0."""
RATE = 16000
SHAPE = AudioShape(RATE, RATE, ((160, 160, 0), (3, 1, 1), (3, 2, 1)), True)
"""A window is a second: 100 frames, 50 positions."""
MAX_OWN = 64

CONFIG = {"model_type": "whisper", "is_encoder_decoder": True, "decoder_start_token_id": START}
GENERATION = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [32, EOS],
    "max_initial_timestamp_index": 5,
    "max_length": MAX_OWN,
}

Writes = Callable[[AddRequest], tuple[list[int], float]]
"""The ids that an output has before its end, and the log-probability of each."""


class Hearing(FakeEngine):
    """Says that the sound is German and no silence; what it writes about it is up to `writes`."""

    def __init__(self, writes: Writes, shape: AudioShape = SHAPE) -> None:
        super().__init__()
        assert self.info is not None
        self.shape, self.most = shape, shape.num_positions(shape.max_samples)
        known = {"vocab_size": 2000, "audio": shape, "max_input": self.most, "max_own": MAX_OWN, "aligns": True}
        self.info = msgspec.structs.replace(self.info, **known)
        self.writes, self.silence = writes, 0.01

    async def generate(self, request: AddRequest) -> FakeGeneration:
        assert isinstance(request.input, AudioInput)
        fault, params = request.input.fault(2000, InputLimits(self.most, MAX_OWN, self.shape)), request.sampling_params
        assert fault is None, fault
        if request.pooling is not None and request.pooling.aligned is not None:  # a token for each position
            values = struct.pack(f"<{len(request.input.token_ids)}f", *range(len(request.input.token_ids)))
            values = values[: 4 * (len(request.input.token_ids) - request.pooling.aligned[0])]
            one_vector = PooledOutput(request.request_id, 0, values, len(values) // 4, FinishReason.STOP)
            generation = FakeGeneration([one_vector], self.error, self.may_go_on)
            self.asked.append(Asked(request, generation))
            return generation
        ids, logprob = ([GERMAN], -0.1) if params.max_tokens == 1 else self.writes(request)
        if params.max_tokens != 1:
            ids = [*ids, EOS]
        extra = [math.log(self.silence)] * len(params.logprob_token_ids)
        one = TokenLogprobs(logprob, list(params.logprob_token_ids), extra)
        output = TokensOutput(request.request_id, 0, ids, FinishReason.STOP, EOS if ids[-1] == EOS else None)
        output.logprobs = None if params.logprobs is None else [one] * len(ids)
        generation = FakeGeneration([output], self.error, self.may_go_on)
        self.asked.append(Asked(request, generation))
        return generation

    @property
    def texts(self) -> list[Any]:
        """The requests for text, without those about language and silence."""
        return [each for each in self.asked if each.params.max_tokens != 1]


def hearing_site(
    folder: Path,
    writes: Writes,
    shape: AudioShape = SHAPE,
    config: Any = CONFIG,
    generation: Any = GENERATION,
    **settings: Any,
) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    site = Site(model=str(folder), **settings)
    site.engine = Hearing(writes, shape)
    site.rebuild()
    return site


def hearing_and_chatting_site(folder: Path, writes: Writes) -> Any:
    """Serves `ears`, whose window is half a minute, and after it `chat`, which reads text."""
    shape = msgspec.structs.replace(SHAPE, max_samples=30 * RATE)
    site = hearing_site(folder, writes, shape, served_model_name=("ears",))
    ears = served_model(site.engine, site.tokenizer, site.settings)
    chat = served_model(FakeEngine(), ByteTokenizer(), Settings.model_validate({"served_model_name": ("chat",)}))
    site.app = create_app({"ears": ears, "chat": chat}, site.settings)
    return site


def saying(text: str, logprob: float = -0.2) -> Writes:
    return lambda request: (list(text.encode()), logprob)


def wav(seconds: float, rate: int = RATE, channels: int = 1) -> bytes:
    """A file whose sample i is i, in thousands."""
    data = array("h", (i // 16 % 1000 for i in range(int(seconds * rate)) for _ in range(channels))).tobytes()
    return wav_header(len(data), rate, channels) + data


def wav_header(num_bytes: int, rate: int, channels: int) -> bytes:
    each = (rate * channels * 2) % 2**32, channels * 2 % 2**16
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, *each, 16)
    return b"RIFF" + struct.pack("<I", 36 + num_bytes) + b"WAVEfmt " + form + b"data" + struct.pack("<I", num_bytes)
