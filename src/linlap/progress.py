"""What is being done, for a person at a terminal: one line, quiet elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

Shown = bool | None
"""Is it to be seen? None: in a terminal only."""


class Report:
    """Says which stage has begun and how the objective goes."""

    def __init__(self, line: Status | None = None) -> None:
        self._line, self._stage = line, ""

    def __call__(self, stage: str) -> None:
        """A stage begins."""
        self._stage = stage
        self._say(stage)

    def value(self, name: str, value: float) -> None:
        """A number worth seeing while a stage runs."""
        self._say(f"{self._stage}: {name} {value:.3f}")

    def _say(self, text: str) -> None:
        if self._line is not None:
            self._line.update(f"linlap: {text}")


@contextmanager
def shown(progress: Shown) -> Iterator[Report]:
    """A report that is seen if `progress` is True, or None in a terminal."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield Report()
        return
    with Console(stderr=True).status("linlap") as line:
        yield Report(line)
