"""Text that comes from jobs, made fit for a terminal, a table cell and a log line."""

from __future__ import annotations

import re

# Whole escape sequences first (colours, cursor movements, window titles), then whatever control byte is left.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]"
)
_BREAK = re.compile(r"[\t\n\v\f\r\u2028\u2029]+")
# C0, C1, and the marks that turn the direction of the text around them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` in one line, without terminal escapes and control characters."""
    return _CONTROL.sub("", _BREAK.sub(" ", _ESCAPE.sub("", text))).strip()
