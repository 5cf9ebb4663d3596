"""The process that reads pictures: `python -m weft.server.pictures.child FOLDER TOKEN_ID BYTES FD`.

Pillow decodes what strangers made, and the checkpoint's own processor of transformers makes of it what the model reads.
The kernel bounds this process: its address space may grow by BYTES, it opens no file, and a signal ends it when a
picture has used its time. It serves one file at a time from standard input, which is a socket, and ends when that is
closed. What it makes goes to FD, which is memory. Its owner starts another one if it dies (see `process`).
"""

import hashlib
import io
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from weft.engine.fields import Fields
from weft.engine.vision.families import SEEING, SeeingFamily
from weft.engine.wire.messages import frame, receive
from weft.engine.wire.pictures import ITEM_BYTES, MAX_REQUEST_BYTES, PictureArray
from weft.server.child_limits import bound_this_process
from weft.server.pictures.calls import CPU_S, FORMATS, MAX_FILE_BYTES, MAX_PIXELS, MAX_RATIO, Made, Ready

_OF_TEXT: Final = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"),
        *("text_replacement_offsets", "cross_attention_mask"),
    }
)
"""What a processor returns of a text."""
_OTHERS: Final = {b"GIF8": "GIF", b"<svg": "SVG", b"<?xml": "XML, perhaps SVG", b"BM": "BMP", b"%PDF": "PDF"}
_OTHERS_AT: Final = {b"ftypavif": "AVIF", b"ftypheic": "HEIC"}
_WIDER: Final = {"float64": "float32", "float16": "float32", "int32": "int64", "uint8": "int64"}


class PictureFaultError(Exception):
    """The file cannot be shown to the model; the message says why."""


def main(folder: str, token_id: int, max_bytes: int, target: int) -> None:
    """Serve until the socket is closed.

    Args:
        token_id: That of features.
        max_bytes: By which this process may grow once it has loaded.
        target: The number of the open memory that arrays go to.
    """
    link = socket.socket(fileno=0)
    try:
        reader = PictureReader(Path(folder), token_id, target)
        reader.read(_blank())  # which imports whatever is still to be imported
    except Exception as error:  # whatever somebody else's code raises
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        link.sendall(frame(msgspec.msgpack.encode(Ready(fault=fault))))
        return
    bound_this_process(max_bytes)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_REQUEST_BYTES, MAX_REQUEST_BYTES))
    link.sendall(frame(msgspec.msgpack.encode(Ready(reader.sign))))
    while True:
        try:
            data = receive(link, MAX_FILE_BYTES)
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # which ends this process, whatever it is doing
        try:
            made = reader.read(data)
        except PictureFaultError as error:
            made = Made(str(error))
        except MemoryError:
            made = Made(f"to read it takes more than {max_bytes >> 20} MiB of memory")
        link.sendall(frame(msgspec.msgpack.encode(made)))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _blank() -> bytes:
    from PIL import Image

    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # `opened` looks at the size before anything is decoded
    Image.new("RGB", (64, 48)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


class PictureReader:
    """A checkpoint's processor.

    Attributes:
        sign: What a chat template writes for a picture.
    """

    def __init__(self, folder: Path, token_id: int, target: int) -> None:
        """Load it; transformers raises what it likes."""
        import torch

        torch.set_num_threads(1)
        self._processor = processor_of(folder)
        self._is_attended = _family(folder).is_attended
        self._target = target
        self._placeholder: str = self._processor.tokenizer.convert_ids_to_tokens(token_id)
        self.sign: str = self._processor.image_token
        self._settings = json.dumps(self._processor.image_processor.to_dict(), sort_keys=True, default=str).encode()

    def read(self, data: bytes) -> Made:
        """What the model reads of a file.

        Raises:
            PictureFaultError: The file is damaged or exceeds a bound, or the processor refuses it.
            MemoryError: There is too little.
        """
        image = opened(data)
        try:
            if self._is_attended:  # in the prompt it is this sign
                made, text = self._processor(text=self.sign, images=[image]), self.sign
            else:
                made = self._processor(text=self.sign, images=[image], return_text_replacement_offsets=True)
                text = made["text_replacement_offsets"][0][0]["replacement"]
            values = _values({name: value for name, value in made.items() if name not in _OF_TEXT})
        except MemoryError:
            raise
        except Exception as error:  # whatever somebody else's code raises
            size, fault = f"{image.width} x {image.height}", " ".join(str(error).split())[:300]
            raise PictureFaultError(f"the model's processor refuses a picture of {size} pixels: {fault}") from None
        num_bytes = sum(value.nbytes for value in values.values())
        if num_bytes > MAX_REQUEST_BYTES:
            fault = f"as the model reads it, it must have at most {MAX_REQUEST_BYTES} bytes, got {num_bytes}"
            raise PictureFaultError(fault)
        digest, arrays, start = hashlib.blake2b(self._settings, digest_size=16), dict[str, PictureArray](), 0
        for name, value in sorted(values.items()):
            arrays[name] = PictureArray(str(value.dtype), value.shape, start)
            content = memoryview(value).cast("B")
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            digest.update(content)
            while content:
                num_written = os.pwrite(self._target, content, start)
                content, start = content[num_written:], start + num_written
        count, attended = text.count(self._placeholder), self._is_attended
        return Made(None, text, self._placeholder, count, digest.digest(), arrays, num_bytes, attended)


def _family(folder: Path) -> SeeingFamily:
    return SEEING[Fields.read(folder / "config.json").texts("architectures")[0]]


def processor_of(folder: Path) -> Any:
    """A checkpoint's processor, without what it has for videos and sounds, which needs more packages.

    transformers raises what it likes.
    """
    import transformers
    from transformers.models.auto import processing_auto

    family, kind = _family(folder), Fields.read(folder / "config.json").optional_text("model_type") or ""
    library, auto = cast(Any, transformers), cast(Any, processing_auto)  # of which little has types
    named: Any = auto.processor_class_from_name(family.processor or auto.PROCESSOR_MAPPING_NAMES[kind])
    means: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

    class OfPictures(named):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            parts = {
                "image_processor": library.AutoImageProcessor.from_pretrained(folder, backend="pil", **means),
                "tokenizer": library.AutoTokenizer.from_pretrained(folder, **means),
            }
            return [parts.get(name) for name in named.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return OfPictures.from_pretrained(folder, **means)


def _values(made: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that a processor made, each of a type that the model takes."""
    import numpy as np

    found = {}
    for name, value in made.items():
        array = np.ascontiguousarray(value)
        kind = "bool" if name.endswith("_mask") else _WIDER.get(str(array.dtype), array.dtype)  # as large as the pixels
        array = array.astype(kind, copy=False)
        if str(array.dtype) not in ITEM_BYTES or not array.size:
            raise TypeError(f"{name} holds {array.size} values of {array.dtype}")
        found[name] = array
    return found


def opened(data: bytes) -> Any:
    """The picture in a file, upright, in red, green and blue, as transformers loads pictures.

    Raises:
        PictureFaultError: It is damaged or exceeds a bound.
        MemoryError: There is too little.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise PictureFaultError(f"it must have at most {MAX_PIXELS} pixels, got {width} x {height}")
        if max(width, height) > MAX_RATIO * min(width, height):
            fault = f"its longer side must be at most {MAX_RATIO} times the shorter one, got {width} x {height} pixels"
            raise PictureFaultError(fault)
        # A JPEG of a telephone may have a second picture, such as one of depths: MPO to Pillow.
        if image.format != "MPO" and (num_frames := getattr(image, "n_frames", 1)) > 1:
            raise PictureFaultError(f"it must be one still picture, got {num_frames} frames")
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise PictureFaultError(f"it must be a PNG, JPEG or WebP, got {_kind(data)}") from None
    except (PictureFaultError, MemoryError):
        raise
    except Exception as error:  # whatever Pillow raises
        raise PictureFaultError(f"it is damaged ({' '.join(str(error).split())[:200]})") from None


def _kind(data: bytes) -> str:
    start = data[:64].lstrip()
    named = next((name for magic, name in _OTHERS.items() if start.startswith(magic)), None)
    return named or _OTHERS_AT.get(data[4:12], "something else, or a damaged one")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
