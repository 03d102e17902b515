"""A file of a trace: plain, gzip or a tar archive of one file; read in blocks of whole lines.

A block ends at the end of a line that is not inside double quotes, so that each can be parsed alone: memory holds one
block of text at a time, whatever the size of the file.
"""

from __future__ import annotations

import csv
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from icefrog.errors import UserError

BLOCK_BYTES = 1 << 23
_MAX_HEADER_BYTES = 1 << 16
_CORRUPT_HINT = "download or copy the file again; `gzip -t FILE` checks it"
_TEXT_HINT = "a trace is a text file in UTF-8, plain or gzip"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file. ``line``: the number of the first, from 1."""

    path: Path
    line: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A trace file that was looked into: where it is, and what its first line says."""

    path: Path
    head: str
    """The first line that is not blank, without its end."""
    header: tuple[str, ...]
    """The cells of the header: of the first line, or of the ``.header`` file that lies beside."""
    header_apart: bool = False
    """Whether the header is in a file of its own, so that the first line is data."""

    @property
    def is_folder(self) -> bool:
        """Whether the trace is a folder of tables."""
        return self.path.is_dir()

    def cells(self, separator: str) -> tuple[str, ...]:
        """The first line, split."""
        return split_header(self.head, separator)

    def blocks(self, *, quotes: bool = True) -> Iterator[Block]:
        """The lines below the header, in blocks of about ``BLOCK_BYTES``.

        Args:
            quotes: whether line ends inside double quotes belong to a cell.

        Raises:
            UserError: unreadable, corrupt or truncated, not UTF-8 text.
        """
        skip_header = not self.header_apart
        for block in _blocks(self.path, BLOCK_BYTES, quotes):
            data, line = block.data, block.line
            if skip_header:
                body = data.lstrip(b"\r\n")
                if not body:
                    continue
                line += data[: len(data) - len(body)].count(b"\n") + 1
                data = body.partition(b"\n")[2]
                skip_header = False
            if data:
                yield Block(self.path, line, data)

    def text(self) -> str:
        """All of the file. Raises :class:`icefrog.errors.UserError` as :meth:`blocks` does."""
        return b"".join(block.data for block in _blocks(self.path, 1 << 26, False)).decode()


def open_source(path: Path) -> Source:
    """Look at the first line of a file, and for a header beside it (``NAME.header`` for ``NAME.csv.gz``).

    Raises:
        UserError: the file cannot be read, is no text, or is empty.
    """
    if path.is_dir():
        return Source(path, "", ())
    head = ""
    for block in _blocks(path, _MAX_HEADER_BYTES, False):
        head = block.data.lstrip(b"\r\n").partition(b"\n")[0].decode().rstrip("\r")
        if head.strip():
            break
    if not head.strip():
        raise UserError(f"{path}: the file is empty", "a trace has a header line and one line a job")
    beside = path.with_name(path.name.split(".")[0] + ".header")
    if beside != path and beside.is_file():
        names = split_header(b"".join(block.data for block in _blocks(beside, 1 << 16, False)).decode())
        if names != split_header(head) and len(names) == len(split_header(head)):
            return Source(path, head, names, header_apart=True)
    return Source(path, head, split_header(head))


def split_header(line: str, separator: str = ",") -> tuple[str, ...]:
    """The cells of a header line; one that cannot be split is returned whole."""
    line = line.strip("\r\n").split("\n", 1)[0]
    try:
        return tuple(cell.strip() for cell in next(csv.reader([line], delimiter=separator, strict=True)))
    except (csv.Error, StopIteration):
        return (line,)


def _blocks(path: Path, size: int, quotes: bool) -> Iterator[Block]:
    rest, line, offset = b"", 1, 0
    try:
        with _unpacked(path) as stream:
            while chunk := stream.read(size):
                data = rest + chunk
                cut = _safe_end(data) if quotes else data.rfind(b"\n") + 1
                ready, rest = data[:cut], data[cut:]
                if ready:
                    yield _checked(path, line, ready, offset)
                    line += ready.count(b"\n")
                    offset += len(ready)
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path}: damaged gzip file ({error})", _CORRUPT_HINT) from error
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    if rest:
        yield _checked(path, line, rest, offset)


def _safe_end(data: bytes) -> int:
    """Where the last line ends that has all its quotes closed; 0 if none does."""
    odd = data.count(b'"') % 2
    end = len(data)
    while (cut := data.rfind(b"\n", 0, end)) >= 0:
        odd = (odd + data.count(b'"', cut, end)) % 2
        if not odd:
            return cut + 1
        end = cut
    return 0


def _checked(path: Path, line: int, data: bytes, offset: int) -> Block:
    if line == 1 and data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    try:
        data.decode()
    except UnicodeDecodeError as error:
        place = f"byte {data[error.start]:#04x} at offset {offset + error.start} is not UTF-8"
        raise UserError(f"{path}: not a text file: {place}", _TEXT_HINT) from error
    if b"\x00" in data:
        raise UserError(f"{path}: not a text file: it holds NUL bytes", _TEXT_HINT)
    return Block(path, line, data)


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The file's content: what it is packed with is told by its first bytes, not by its name."""
    with path.open("rb") as raw:
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        with gzip.GzipFile(fileobj=raw) if packed else raw as stream:
            if stream.peek(512)[257:262] != b"ustar":
                yield cast(IO[bytes], stream)
                return
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                member = next((part for part in archive if part.isfile()), None)
                inner = archive.extractfile(member) if member is not None else None
                if inner is None:
                    raise UserError(f"{path}: an archive without a file in it", "pack one table in it, or none")
                yield inner
