"""From a delimited file to a table of strings and on to numbers; errors name file, line and column.

Everything is read as text first: a cell that does not parse must be reported with its line and its value,
which a typed reader cannot do. Lines count from 1, the header being line 1.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import polars as pl

from icefrog.errors import UserError

_CORRUPT_HINT = "download or copy the file again; `gzip -t FILE` checks it"


@dataclass(frozen=True, slots=True)
class Table:
    """A delimited file: every cell a string, null where it is empty."""

    path: Path
    text: str
    frame: pl.DataFrame

    @property
    def columns(self) -> list[str]:
        """The header, as written."""
        return self.frame.columns

    def fail(self, row: int, column: str, allowed: str, hint: str) -> NoReturn:
        """Raise the error for one bad cell (``row`` counts from 0, without the header)."""
        value = self.frame[column][row]
        where = f"{self.path}, line {_line_of_record(self.text, row + 1)}, column '{column}'"
        given = "it is empty" if value is None else f"got {_short(value)}"
        raise UserError(f"{where}: {given}, allowed: {allowed}", hint)


def read_text(path: Path) -> str:
    """The file's text, unpacked when it is gzip (by content, not by name).

    Raises:
        UserError: unreadable, corrupt or truncated gzip, not UTF-8 text, or empty.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise UserError(f"{path}: damaged gzip file ({error})", _CORRUPT_HINT) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not a text file: byte {raw[error.start]:#04x} at offset {error.start} is not UTF-8",
            "a trace is a CSV file in UTF-8, plain or gzip",
        ) from error
    if "\x00" in text:
        raise UserError(f"{path}: not a text file: it holds NUL bytes", "a trace is a CSV file in UTF-8, plain or gzip")
    if not text.strip():
        raise UserError(f"{path}: the file is empty", "a trace has a header line and one line a job")
    return text


def header_of(text: str) -> list[str]:
    """The cells of the first line; one that cannot be split is returned whole."""
    first = text.lstrip("\r\n").split("\n", 1)[0].rstrip("\r")
    try:
        return [cell.strip() for cell in next(csv.reader([first], strict=True))]
    except (csv.Error, StopIteration):
        return [first]


def parse_table(path: Path, text: str) -> Table:
    """Split the text into cells.

    Raises:
        UserError: a line with more cells than the header, quotes that do not close, or a column given twice.
    """
    header = header_of(text)
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UserError(f"{path}, line 1: the column {twice!r} is given twice", "keep one of the two columns")
    try:
        frame = pl.read_csv(
            io.BytesIO(text.encode()),
            infer_schema=False,
            raise_if_empty=False,
        )
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, ValueError) as error:
        raise _shape_error(path, text, error) from error
    named = frame.rename({name: name.strip() for name in frame.columns}) if _strippable(frame.columns) else frame
    return Table(path, text, named.with_columns(pl.all().str.strip_chars().replace("", None)))


def numbers(table: Table, column: str, allowed: str, hint: str) -> pl.Series:
    """A column as float64, null where the cell is empty.

    Raises:
        UserError: a cell that is not a finite number.
    """
    text = table.frame[column]
    value = text.cast(pl.Float64, strict=False)
    bad = text.is_not_null() & (value.is_null() | ~value.is_finite())
    row = bad.fill_null(True).arg_max() if bad.fill_null(True).any() else None
    if row is not None:
        table.fail(row, column, allowed, hint)
    return value


def require(table: Table, good: pl.Series, column: str, allowed: str, hint: str) -> None:
    """Raise for the first row where ``good`` is false or null."""
    bad = ~good.fill_null(False)
    if bad.any():
        row = bad.arg_max()
        assert row is not None
        table.fail(row, column, allowed, hint)


def empty_rows(table: Table) -> pl.Series:
    """Mask of the rows without a single cell (blank lines)."""
    return table.frame.select(pl.all_horizontal(pl.all().is_null()).alias("empty"))["empty"]


def _strippable(columns: list[str]) -> bool:
    stripped = [name.strip() for name in columns]
    return stripped != columns and len(set(stripped)) == len(stripped)


def _records(text: str) -> list[tuple[int, list[str]]]:
    """(line on which it begins, cells) of every record; leading blank lines are no records."""
    reader = csv.reader(io.StringIO(text.lstrip("\r\n")))
    skipped = text[: len(text) - len(text.lstrip("\r\n"))].count("\n")
    records, begin = [], 1
    try:
        for cells in reader:
            records.append((begin + skipped, cells))
            begin = reader.line_num + 1
    except csv.Error:
        pass  # the caller names the last record that could be read
    return records


def _line_of_record(text: str, index: int) -> int:
    records = _records(text)
    return records[index][0] if index < len(records) else index + 1


def _shape_error(path: Path, text: str, error: BaseException) -> UserError:
    records = _records(text)
    width = len(records[0][1]) if records else 0
    for line, cells in records[1:]:
        if len(cells) > width:
            return UserError(
                f"{path}, line {line}: {len(cells)} cells, allowed: {width} as in the header",
                "a value that holds a comma must stand in double quotes",
            )
    reason = (str(error).splitlines() or ["unknown format"])[0]
    return UserError(f"{path}: not a CSV file ({_short(reason)})", "check that every double quote is closed")


def _short(value: str, limit: int = 60) -> str:
    return repr(value if len(value) <= limit else value[:limit] + "...")
