"""The process that reads pictures: `python -m weft.server.pictures.child FOLDER TOKEN_ID DTYPE BYTES FD`.

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
from importlib import import_module
from pathlib import Path
from typing import Any, Final

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
_PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json")
"""What names a checkpoint's processor, if it is not its family's."""
_HALVES: Final = ("float16", "bfloat16")
_WIDER: Final = {"float64": "float32", "float16": "float32", "int32": "int64", "uint8": "int64"}


class PictureFaultError(Exception):
    """The file cannot be shown to the model; the message says why."""


def main(folder: str, token_id: int, dtype: str, max_bytes: int, target: int) -> None:
    """Serve until the socket is closed.

    Args:
        token_id: That of features.
        dtype: In what the engine computes.
        max_bytes: By which this process may grow once it has loaded.
        target: The number of the open memory that arrays go to.
    """
    link = socket.socket(fileno=0)
    try:
        reader = PictureReader(Path(folder), token_id, dtype, target)
        reader.read(_blank())  # which imports whatever is still to be imported
    except Exception as error:  # whatever somebody else's code raises
        ready = Ready(fault=type(error).__name__, text=" ".join(str(error).split())[:1000])
        link.sendall(frame(msgspec.msgpack.encode(ready)))
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

    def __init__(self, folder: Path, token_id: int, dtype: str, target: int) -> None:
        """Load it; transformers raises what it likes."""
        import torch

        torch.set_num_threads(1)
        self._processor = processor_of(folder)
        self._dtype, self._target = dtype, target
        self._family = _family(Fields.read(folder / "config.json"))
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
            if self._family.is_attended:  # in the prompt it is this sign
                made, text = self._processor(text=self.sign, images=[image]), self.sign
            else:
                made = self._processor(text=self.sign, images=[image], return_text_replacement_offsets=True)
                text = made["text_replacement_offsets"][0][0]["replacement"]
            values = _values({name: value for name, value in made.items() if name not in _OF_TEXT}, self._dtype)
        except MemoryError:
            raise
        except Exception as error:  # whatever somebody else's code raises
            size, fault = f"{image.width} x {image.height}", " ".join(str(error).split())[:300]
            raise PictureFaultError(f"the model's processor refuses a picture of {size} pixels: {fault}") from None
        num_tokens = text.count(self._placeholder)
        if num_tokens < self._family.least_tokens:
            fault = f"it must be at least {self._family.least_tokens} tokens to the model, got {num_tokens}"
            raise PictureFaultError(f"{fault} ({image.width} x {image.height} pixels)")
        num_bytes = sum(value.nbytes for _, value in values.values())
        if num_bytes > MAX_REQUEST_BYTES:
            fault = f"as the model reads it, it must have at most {MAX_REQUEST_BYTES} bytes, got {num_bytes}"
            raise PictureFaultError(fault)
        digest, arrays, start = hashlib.blake2b(self._settings, digest_size=16), dict[str, PictureArray](), 0
        for name, (kind, value) in sorted(values.items()):
            arrays[name] = PictureArray(kind, value.shape, start)
            content = memoryview(value).cast("B")
            digest.update(f"{name} {kind} {value.shape}".encode())
            digest.update(content)
            while content:
                num_written = os.pwrite(self._target, content, start)
                content, start = content[num_written:], start + num_written
        grid, attended = self._grid(values), self._family.is_attended
        return Made(None, text, self._placeholder, num_tokens, digest.digest(), arrays, num_bytes, grid, attended)

    def _grid(self, values: Mapping[str, tuple[str, Any]]) -> tuple[int, int] | None:
        """See `Picture`; what sees merges squares of patches into one feature."""
        if not self._family.sections:
            return None
        _, rows, columns = values["image_grid_thw"][1][0].tolist()
        merged = self._processor.image_processor.merge_size
        return rows // merged, columns // merged


def processor_of(folder: Path) -> Any:
    """A checkpoint's processor, without what it has for videos and sounds, which needs more packages.

    transformers raises what it likes.
    """
    import transformers

    fields = Fields.read(folder / "config.json")
    kind = fields.optional_text("model_type") or ""
    library: Any = transformers  # of which little has types
    own = next(filter(None, (_processor_named(folder / name) for name in _PROCESSOR_FILES)), None)
    named: Any = _processor_class(_family(fields).processor or own or _auto().PROCESSOR_MAPPING_NAMES[kind])
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


def _family(fields: Fields) -> SeeingFamily:
    return SEEING[fields.texts("architectures")[0]]


def _processor_named(path: Path) -> str | None:
    return Fields.read(path).optional_text("processor_class") if path.is_file() else None


def _processor_class(name: str) -> Any:
    """A processor of transformers; that of Pixtral without torchvision, of which it takes one function.

    The image processor for Pillow has the same function, so that module stands in for the other one.
    """
    if name != "PixtralProcessor":
        return _auto().processor_class_from_name(name)
    module = "transformers.models.pixtral"
    same = import_module(f"{module}.image_processing_pil_pixtral")
    sys.modules.setdefault(f"{module}.image_processing_pixtral", same)
    return import_module(f"{module}.processing_pixtral").PixtralProcessor


def _auto() -> Any:
    return import_module("transformers.models.auto.processing_auto")


def _values(made: Mapping[str, Any], dtype: str) -> dict[str, tuple[str, Any]]:
    """The arrays that a processor made, each with its type, which the model takes."""
    import numpy as np
    import torch

    found = {}
    for name, value in made.items():
        array = np.ascontiguousarray(value)
        kind = _WIDER.get(str(array.dtype), str(array.dtype))
        kind = "bool" if name.endswith("_mask") else kind  # there are as many values as pixels
        array = array.astype(kind, copy=False)
        if kind == "float32" and dtype in _HALVES:  # to which the model rounds them first of all
            kind, rounded = dtype, torch.from_numpy(array).to(getattr(torch, dtype))
            array = rounded.view(torch.int16).numpy()  # numpy knows no bfloat16
        if kind not in ITEM_BYTES or not array.size:
            raise TypeError(f"{name} holds {array.size} values of {kind}")
        found[name] = kind, array
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
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
