"""Fetches the libraries of the chat page, pinned by checksum, into `server/chat_page/vendor`.

    python -m docs.vendor

They are committed, packed as they are sent, so that a checkout needs neither a network nor a build step. Also fetches
the examples of the CommonMark specification that the tests compare with. To update one, change its version and checksum
here.
"""

import functools
import gzip
import hashlib
import io
import json
import pathlib
import re
import tarfile
import urllib.request
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "server" / "chat_page" / "vendor"
EXAMPLES = ROOT / "tests" / "end_to_end" / "commonmark.json"


@dataclass(frozen=True, slots=True)
class Library:
    """A package of npm, and the one file of it that the page loads.

    Attributes:
        sha256: Of the package's archive.
        path: Of the file inside the archive.
    """

    package: str
    version: str
    license: str
    sha256: str
    path: str
    use: str

    @property
    def url(self) -> str:
        """Where the archive is."""
        name = self.package.rpartition("/")[2]
        return f"https://registry.npmjs.org/{self.package}/-/{name}-{self.version}.tgz"


_PDF = "7461aefcd27c4ef0dd76f9ca5760f09466eb6b3f934432670c12132e7b3d6faa"
LIBRARIES = {
    "markdown-it.js": Library(
        "markdown-it",
        "15.0.3",
        "MIT",
        "98a7453983ab0e268c17dbd5260bf7190ba46b4cca912327fc1c1a2578e4b56d",
        "dist/browser/markdown-it.esm.min.mjs",
        "reads Markdown.",
    ),
    "katex.js": Library(
        "katex",
        "0.19.1",
        "MIT",
        "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd",
        "dist/katex.min.js",
        "draws formulas.",
    ),
    "highlight.js": Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        "b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9",
        "es/highlight.min.js",
        "colours code.",
    ),
    "pdf.js": Library(
        "pdfjs-dist",
        "6.5.438",
        "Apache-2.0",
        _PDF,
        "legacy/build/pdf.min.mjs",
        "reads PDFs, also in browsers that are some years old.",
    ),
    "pdf.worker.js": Library(
        "pdfjs-dist",
        "6.5.438",
        "Apache-2.0",
        _PDF,
        "legacy/build/pdf.worker.min.mjs",
        "is the other half of it.",
    ),
}
SPECIFICATION = Library(
    "commonmark-spec",
    "0.31.2",
    "CC-BY-SA-4.0",
    "588280df96c211f7ce9db0b7943ded34ac4b8ba321e2fdf9c03d188ec0f01fea",
    "spec.txt",
    "the examples of the specification.",
)
_EXAMPLE = re.compile(r"^`{32} example\n(.*?)^\.\n(.*?)^`{32}$|^#{1,6} *(.*?)$", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Write the libraries, their licenses and versions, and the examples."""
    FOLDER.mkdir(exist_ok=True)
    licenses = []
    for name, library in LIBRARIES.items():
        files = _fetch(library)
        head = f"// {library.package} {library.version}, {library.license}: {library.use}\n"
        text = head + re.sub(r"\n//# sourceMappingURL=.*\n?$", "\n", files[library.path].decode())
        (FOLDER / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        licenses.append(f"{name}: {library.package} {library.version}\n\n{files['LICENSE'].decode().strip()}\n")
    (FOLDER / "LICENSES.txt").write_text(f"\n{'-' * 80}\n\n".join(licenses), encoding="utf-8")
    names = sorted(path.name for path in FOLDER.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (FOLDER / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    EXAMPLES.write_text(_examples(_fetch(SPECIFICATION)[SPECIFICATION.path].decode()), encoding="utf-8")


def _fetch(library: Library) -> dict[str, bytes]:
    """The library's file and its license."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(_archive(library.url, library.sha256))) as tar:
        for member in tar.getmembers():
            if member.name in (f"package/{library.path}", "package/LICENSE") and (file := tar.extractfile(member)):
                files[member.name.removeprefix("package/")] = file.read()
    return files


@functools.cache
def _archive(url: str, sha256: str) -> bytes:
    """The archive of a package, after a check."""
    with urllib.request.urlopen(url) as answer:
        archive: bytes = answer.read()
    if (found := hashlib.sha256(archive).hexdigest()) != sha256:
        raise SystemExit(f"{url} has the checksum {found}, not {sha256}")
    return archive


def _examples(specification: str) -> str:
    """The examples as JSON, one a line: section, Markdown, HTML."""
    section, lines = "", []
    for found in _EXAMPLE.finditer(specification.partition("<!-- END TESTS -->")[0]):
        if found[3] is not None:
            section = found[3]
        else:
            markdown, html = (part.replace("→", "\t") for part in (found[1], found[2]))
            lines.append(json.dumps([section, markdown, html], ensure_ascii=False))
    source = f"CommonMark {SPECIFICATION.version}, {SPECIFICATION.license}, John MacFarlane"
    return f'{{"source": "{source}", "examples": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    main()
