"""Text that a client keeps for this server: encrypted and authenticated with a key in the data folder.

Encrypt, then authenticate: SHAKE-256 of key and nonce is the key stream, keyed BLAKE2b the tag (RFC 7693). A client can
neither read the text nor make or change one.
"""

import base64
import hashlib
import hmac
import os
import pathlib
import secrets

_KEY_NAME = "sealing.key"
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 16, 32


class Sealer:
    """Seals and unseals with one key."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Read the key in the folder; make it if there is none. All server processes get the same.

        Raises:
            OSError: The folder cannot be used.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _KEY_NAME
        if not path.exists():
            made = folder / f"{_KEY_NAME}.{secrets.token_hex(8)}"
            made.touch(mode=0o600)
            made.write_bytes(secrets.token_bytes(_KEY_BYTES))
            try:
                os.link(made, path)  # whole from the first moment; the first process wins
            except FileExistsError:
                pass
            finally:
                made.unlink()
        self._key = path.read_bytes()

    def seal(self, text: str) -> str:
        """The sealed text."""
        nonce, data = secrets.token_bytes(_NONCE_BYTES), text.encode()
        sealed = nonce + self._mixed(nonce, data)
        return base64.urlsafe_b64encode(sealed + self._tag(sealed)).decode()

    def unseal(self, text: str) -> str | None:
        """The text; None if this key did not seal it."""
        try:
            data = base64.urlsafe_b64decode(text.encode())
        except ValueError:
            return None
        sealed, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if len(sealed) < _NONCE_BYTES or not hmac.compare_digest(tag, self._tag(sealed)):
            return None
        return self._mixed(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]).decode()

    def _mixed(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, sealed: bytes) -> bytes:
        return hashlib.blake2b(sealed, key=self._key, digest_size=_TAG_BYTES, person=b"weft-sealing").digest()
