"""Sealed texts: only this server, for this tenant and as this kind, can read them."""

import pathlib

import pytest

from weft.server.apis.responses.sealing import Sealer


def test_a_sealed_text_comes_back_as_what_it_was(tmp_path: pathlib.Path) -> None:
    sealer = Sealer(tmp_path / "data", "me")
    for text in ("", "x", "wörld: é\n" * 1000):
        sealed = sealer.seal("reasoning", text)
        assert Sealer(tmp_path / "data", "me").unseal("reasoning", sealed) == text  # another process
        assert sealer.unseal("compaction", sealed) is None
        assert Sealer(tmp_path / "data", "you").unseal("reasoning", sealed) is None
        assert Sealer(tmp_path / "other", "me").unseal("reasoning", sealed) is None
        assert sealer.seal("reasoning", text) != sealed


def test_what_was_changed_or_never_sealed_is_nothing(tmp_path: pathlib.Path) -> None:
    sealer = Sealer(tmp_path, "")
    sealed = sealer.seal("reasoning", "a secret")
    assert "secret" not in sealed
    for i in range(0, len(sealed) - 4, 5):
        changed = "B" if sealed[i] == "A" else "A"
        assert sealer.unseal("reasoning", sealed[:i] + changed + sealed[i + 1 :]) is None
    for text in ("", "x", "é", "AAAA", sealed[:40]):
        assert sealer.unseal("reasoning", text) is None


@pytest.mark.parametrize("size", [0, 1, 31, 33])
def test_a_key_that_is_not_whole_is_no_key(tmp_path: pathlib.Path, size: int) -> None:
    """With an empty one, everybody could have sealed."""
    Sealer(tmp_path, "me")
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"x" * size)
    with pytest.raises(OSError, match=f"must have 32 bytes, has {size}"):
        Sealer(tmp_path, "me")
