from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commandbus.exceptions import LeaseLostError


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler may know of its delivery."""

    attempt: int
    """1 at the first attempt."""

    max_attempts: int
    node: str
    """The name of the worker."""

    using: str
    """The database alias whose transaction the handler runs in."""

    extend: Callable[[float], bool]

    def extend_lease(self, seconds: float) -> None:
        """Let the lease end `seconds` from now. Raises LeaseLostError when it was lost already: stop then."""
        if not self.extend(seconds):
            raise LeaseLostError("the lease ran out and the command is no longer ours; stop, nothing will be kept")
