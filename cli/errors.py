"""The one exception that ends a command with a sentence instead of a traceback."""

from __future__ import annotations

USAGE = 2  # wrong use or configuration
RUNTIME = 1  # the command was right and could not be carried out
INTERRUPTED = 130  # Ctrl-C; what shells report for SIGINT


class CliError(Exception):
    """Printed as "headrace: <text>"; the text ends with the way out. `details` are lines printed before it."""

    def __init__(self, text: str, code: int = USAGE, details: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.details = details
