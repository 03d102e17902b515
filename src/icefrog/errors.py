"""The one error that users see: what is wrong, and how to put it right."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong. The CLI prints ``error: message`` and ``hint: hint`` and exits with 2."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
