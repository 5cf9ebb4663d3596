"""Seals what a client keeps for this server: reasoning and compacted conversations."""

import base64
import errno
import hashlib
import hmac
import os
import pathlib
import secrets

_KEY_NAME = "sealing.key"


_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 16, 32


class Sealer:
    """Seals and unseals texts that a client keeps for this server. A client can neither read, make nor change one.

    The tenant's key is derived from one in the data folder, so a text that was sealed for one tenant is nothing to
    another. A text of one kind cannot be unsealed as another. Encrypt, then authenticate: SHAKE-256 of key and nonce is
    the key stream, keyed BLAKE2b the tag (RFC 7693).
    """

    def __init__(self, folder: pathlib.Path, tenant: str) -> None:
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
        secret = path.read_bytes()
        if len(secret) != _KEY_BYTES:  # with an empty one, everybody could seal
            raise OSError(errno.EIO, f"{path} must have {_KEY_BYTES} bytes, has {len(secret)}: remove it")
        self._key = hashlib.blake2b(tenant.encode(), key=secret, digest_size=_KEY_BYTES).digest()

    def seal(self, kind: str, text: str) -> str:
        """The sealed text."""
        nonce, data = secrets.token_bytes(_NONCE_BYTES), f"{kind}:{text}".encode()
        sealed = nonce + self._mixed(nonce, data)
        return base64.urlsafe_b64encode(sealed + self._tag(sealed)).decode()

    def unseal(self, kind: str, text: str) -> str | None:
        """The text; None if it was not sealed as one of this kind for this tenant."""
        try:
            data = base64.urlsafe_b64decode(text.encode())
        except ValueError:
            return None
        sealed, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if len(sealed) < _NONCE_BYTES or not hmac.compare_digest(tag, self._tag(sealed)):
            return None
        found, _, inside = self._mixed(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]).decode().partition(":")
        return inside if found == kind else None

    def _mixed(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, sealed: bytes) -> bytes:
        return hashlib.blake2b(sealed, key=self._key, digest_size=_TAG_BYTES, person=b"weft-sealing").digest()
