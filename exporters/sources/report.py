"""How a long job tells what it does, without knowing whether a terminal, a log or nobody listens."""

from typing import Protocol


class Reporter(Protocol):
    """Receives stages and byte counts; called from several threads at once."""

    def say(self, message: str) -> None:
        """One line for the user."""

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` bytes of the task of that name; `done == total` ends it."""


class Silent:
    """Nobody listens."""

    def say(self, message: str) -> None:
        """Nothing."""

    def progress(self, task: str, done: int, total: int) -> None:
        """Nothing."""
