"""From a block of delimited text to a table of strings and on to numbers; errors name file, line and column.

Everything is read as text first: a cell that does not parse must be reported with its line and its value,
which a typed reader cannot do. Lines count from 1, the header being line 1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import polars as pl

from icefrog.errors import UserError
from icefrog.traces.source import Block, Source


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a delimited file: every cell a string without blanks around it, null where it is empty."""

    block: Block
    frame: pl.DataFrame
    lines: tuple[int, ...] | None = None
    """The line of each row where rows and lines do not go together; None: by counting."""

    @property
    def columns(self) -> list[str]:
        """The header, as written."""
        return self.frame.columns

    def line(self, row: int) -> int:
        """The line on which a row (from 0) begins."""
        return self.lines[row] if self.lines is not None else _line_of_record(self.block, row)

    def fail(self, row: int, column: str, allowed: str, hint: str) -> NoReturn:
        """Raise the error for one bad cell (``row`` counts from 0, without the header)."""
        value = self.frame[column][row]
        where = f"{self.block.path}, line {self.line(row)}, column '{column}'"
        given = "it is empty" if value is None else f"got {shown(value)}"
        raise UserError(f"{where}: {given}, allowed: {allowed}", hint)


def parse_block(source: Source, block: Block) -> Table:
    """Split comma-separated text into cells; double quotes hold commas and line ends.

    Raises:
        UserError: a line with more cells than the header, quotes that do not close, or a column given twice.
    """
    header = _header(source, source.header)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(header)
    try:
        frame = pl.read_csv(io.BytesIO(text.getvalue().encode() + block.data), infer_schema=False, raise_if_empty=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, ValueError) as error:
        raise _shape_error(block, len(header), error) from error
    if frame.width != len(header):
        raise UserError(f"{block.path}: not a CSV file", "check that every double quote is closed")
    frame.columns = list(header)
    return Table(block, _stripped(frame))


def parse_bare(source: Source, block: Block, separator: str) -> tuple[Table, int, int]:
    """Split text that knows no quotes. Returns the table of the lines that have the header's number of cells, how many
    have not, and the number of the first such line (0: none). Blank lines count as rows without a cell.
    """
    header = _header(source, source.cells(separator))
    seams = len(header) - 1
    texts = block.data.decode().split("\n")
    if not texts[-1]:
        texts.pop()
    empty = separator * seams
    good = [(i, t if t.strip() else empty) for i, t in enumerate(texts) if t.count(separator) == seams or not t.strip()]
    wrong = len(texts) - len(good)
    kept = {i for i, _ in good} if wrong else set()
    first = next((block.line + i for i in range(len(texts)) if i not in kept), 0) if wrong else 0
    columns = pl.Series("line", [t for _, t in good], dtype=pl.String).str.split_exact(separator, seams)
    frame = columns.struct.rename_fields(list(header)).struct.unnest()
    return Table(block, _stripped(frame), tuple(block.line + i for i, _ in good)), wrong, first


def whole_table(source: Source) -> Table:
    """All rows at once. Raises :class:`icefrog.errors.UserError` as :func:`parse_block` does."""
    parts = list(source.blocks())
    line = parts[0].line if parts else 2
    return parse_block(source, Block(source.path, line, b"".join(part.data for part in parts)))


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


def shown(value: str, limit: int = 60) -> str:
    """A value as it stands in a message: quoted, on one line, not too long."""
    return repr(value if len(value) <= limit else value[:limit] + "...")


def _header(source: Source, header: Sequence[str]) -> Sequence[str]:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{source.path}, line 1: the column {twice!r} is given twice", "keep one of the two columns")
    return header


def _stripped(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.all().str.strip_chars().replace("", None))


def _records(block: Block) -> list[tuple[int, list[str]]]:
    """(line on which it begins, cells) of every record."""
    reader = csv.reader(io.StringIO(block.data.decode()))
    records, begin = [], 0
    try:
        for cells in reader:
            records.append((begin + block.line, cells))
            begin = reader.line_num
    except csv.Error:
        pass  # the caller names the last record that could be read
    return records


def _line_of_record(block: Block, index: int) -> int:
    if b'"' not in block.data:
        return block.line + index
    records = _records(block)
    return records[index][0] if index < len(records) else block.line + index


def _shape_error(block: Block, width: int, error: BaseException) -> UserError:
    for line, cells in _records(block):
        if len(cells) > width:
            return UserError(
                f"{block.path}, line {line}: {len(cells)} cells, allowed: {width} as in the header",
                "a value that holds a comma must stand in double quotes",
            )
    reason = (str(error).splitlines() or ["unknown format"])[0]
    return UserError(f"{block.path}: not a CSV file ({shown(reason)})", "check that every double quote is closed")
