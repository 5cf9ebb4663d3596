"""The certificate for HTTPS, which may be replaced while the server runs. Imports little: the supervisor checks it."""

import contextlib
import logging
import os
import pathlib
import ssl

from weft.server.settings import Settings, StartError

_log = logging.getLogger(__name__)


class Certificate:
    """The files of the certificate for HTTPS, and the context that was made of them.

    The files may be replaced while the server runs, as cert-manager and KServe do: each connection looks whether they
    changed, and gets the newest pair that could be loaded.
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Load the files.

        Raises:
            StartError: One cannot be read, or they are no certificate and its key.
        """
        given = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
        self._paths = {name: pathlib.Path(path).expanduser() for name, path in given.items()}
        self.context = self._current = self._load()
        self._marks = self._look()
        self.context.sni_callback = self._greet

    def _look(self) -> list[tuple[int, int]]:
        """What differs when a file is replaced."""
        return [(facts.st_ino, facts.st_mtime_ns) for facts in map(os.stat, self._paths.values())]

    def _load(self) -> ssl.SSLContext:
        for name, path in self._paths.items():
            try:
                path.read_bytes()
            except OSError as error:
                raise StartError(f"{name}: {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            certfile, keyfile = self._paths.values()
            context.load_cert_chain(certfile, keyfile, password="")  # without one, OpenSSL would ask the terminal
        except ssl.SSLError as error:
            files = " and ".join(map(str, self._paths.values()))
            fault = (error.reason or "not in PEM format").replace("_", " ").lower()
            raise StartError(f"ssl_certfile, ssl_keyfile: {files} are no certificate with its key: {fault}") from None
        return context

    def _greet(self, connection: ssl.SSLObject, _host: str | None, _context: ssl.SSLContext) -> None:
        """Give a new connection the newest certificate. Keeps the last one while files are missing or half written."""
        with contextlib.suppress(OSError):
            if (marks := self._look()) != self._marks:
                self._marks = marks
                try:
                    self._current = self._load()
                    _log.info("Loaded the certificate anew")
                except StartError as error:
                    _log.error("The certificate stays as it was: %s", error)
        connection.context = self._current


def certificate(settings: Settings) -> Certificate | None:
    """The certificate of the settings; None if they name none. Raises StartError as Certificate does."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    return Certificate(settings.ssl_certfile, settings.ssl_keyfile)
