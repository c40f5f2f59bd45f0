"""The one way out for facts about a run: columns for a table. Who keeps them, and how, is no business of who writes them."""

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes rows as columns. Nothing is kept before `commit`, and everything is after it."""

    def write(self, table: str, columns: Mapping[str, object]) -> None:
        """Columns of equal length; a single value stands for all rows."""

    def commit(self) -> None: ...


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, table: str, columns: Mapping[str, object]) -> None:
        pass

    def commit(self) -> None:
        pass
