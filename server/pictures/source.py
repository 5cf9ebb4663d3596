"""Where the picture of a part is, in every API's form: in the part itself, at an address, or in a file that was sent.

Nothing is decoded, fetched or opened before it is known that the model sees.
"""

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Final

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.pictures.calls import MAX_FILE_BYTES

_WHOLE: Final = (None, "auto", "high", "original")
"""Values of `detail` that ask for no less than what is there."""
_FORMS: Final = "a data: URL in base64, or an https: URL"


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A part that is a picture.

    Attributes:
        at: Its path in the body.
    """

    at: str
    part: Any

    @property
    def type(self) -> str:
        """That of the part."""
        kind: str = self.part.type
        return kind

    def place(self) -> "Place":
        """Where the picture is.

        Raises:
            InvalidRequestError: The part does not say so.
            UnsupportedValueError: It asks for fewer pixels.
        """
        if (source := _member(self.part, "source")) is not None:
            return self._of_source(source)
        if (data := _member(self.part, "data")) is not None:  # Ollama's, which some clients send as a URL
            return self._of_url(data) if data[:5] == "data:" else Place(self.at, data=data)
        url, file_id, detail = (_member(self.part, name) for name in ("image_url", "file_id", "detail"))
        if url is not None and not isinstance(url, str):
            url, detail = url.url, url.detail
        if detail not in _WHOLE:
            bound = "'auto' or 'high', since the model's processor has one size"
            raise UnsupportedValueError(f"{self.at}.detail must be {bound}, got {shown(detail)}", param=self.at)
        if (url is None) == (file_id is None):
            raise InvalidRequestError(f"{self.at} must have either image_url or file_id", param=self.at)
        return self._of_url(url) if url is not None else Place(self.at, file_id=file_id)

    def _of_source(self, source: Any) -> "Place":
        """As in Anthropic's API."""
        given = {"base64": source.data, "url": source.url, "file": source.file_id}
        if (value := given.get(source.type)) is None:
            bound = "of type base64 with data, url with url, or file with file_id"
            raise InvalidRequestError(f"{self.at}.source must be {bound}", param=f"{self.at}.source")
        match source.type:
            case "base64":
                return Place(self.at, data=value)
            case "url":
                return self._of_url(value)
        return Place(self.at, file_id=value)

    def _of_url(self, url: str) -> "Place":
        scheme, _, rest = url.partition(":")
        if scheme.lower() == "data":
            media, comma, data = rest.partition(",")
            if comma and media.endswith(";base64"):
                return Place(self.at, data=data)
        elif scheme.lower() == "https":
            return Place(self.at, url=url)
        raise InvalidRequestError(f"{self.at} must be {_FORMS}, got {shown(url[:32])}", param=self.at)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a picture is: in base64, at an address, or in a file. Two of the three are None.

    Attributes:
        at: The part's path in the body.
    """

    at: str
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


def source_of(part: Any, at: str) -> PictureSource:
    """The picture of a part, whose own path counts if it has one."""
    return PictureSource(_member(part, "place") or at, part)


def _member(part: Any, name: str) -> Any:
    """A member that the part's type has; what callers add of that name may be anything."""
    return getattr(part, name) if name in type(part).model_fields else None


def decoded(data: str, at: str) -> bytes:
    """The file in base64.

    Raises:
        InvalidRequestError: It is none, or too long.
    """
    check_size(len(data) * 3 // 4 - data[-2:].count("="), at)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{at}: the picture must be in base64, and is not", param=at) from None


def check_size(num_bytes: int, at: str) -> None:
    """Refuse a file that is too long, before anything is made of it."""
    if num_bytes > MAX_FILE_BYTES:
        message = f"{at}: the picture must have at most {MAX_FILE_BYTES} bytes, got {num_bytes}"
        raise InvalidRequestError(message, param=at)
