from __future__ import annotations

import enum
import socket
from dataclasses import dataclass, field

from commandbus.exceptions import ConfigurationError


class Suspects(enum.Enum):
    """What a worker does about commands that may have killed a process."""

    LEAVE = "leave"  # to the isolated process of its supervisor
    ONLY = "only"  # it is that process
    WHEN_IDLE = "when_idle"  # it has no supervisor, and runs them when it runs nothing else


class Ending(enum.Enum):
    """Why a worker has ended."""

    STOPPED = "stopped"
    EMPTY = "empty"
    RECYCLE = "recycle"  # it shall be replaced
    ASKED = "asked"  # by an operator: it shall not be replaced


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    domains: tuple[str, ...]
    concurrency: int = 10
    vt: int = 30
    """Seconds of a lease."""
    use_notify: bool = True
    poll_interval: float = 1.0
    until_empty: bool = False
    """End when nothing is ready and nothing runs."""
    max_commands: int | None = None
    """Recycle the process after this many commands."""
    max_memory: int | None = None
    """Recycle the process when it takes more than this many megabytes."""
    name: str = field(default_factory=socket.gethostname)
    suspects: Suspects = Suspects.WHEN_IDLE

    def __post_init__(self) -> None:
        if not self.domains:
            raise ConfigurationError("a worker needs at least one domain, or --replies with one")
        for option in ("concurrency", "vt", "max_commands", "max_memory"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} must be 1 or more, not {value}")
        if not self.poll_interval > 0:
            raise ConfigurationError(f"poll_interval must be more than 0 seconds, not {self.poll_interval}")
