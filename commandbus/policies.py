"""What to do after an exception. Pure: attempt and exception in, decision out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

from commandbus.exceptions import (
    BusinessRuleError,
    CommandCanceled,
    ConfigurationError,
    PermanentCommandError,
    TransientCommandError,
)
from commandbus.messages import Status

MOST_ATTEMPTS = 1_000_000
LONGEST = 3_155_760_000
"""Seconds that a command may wait, here and in SQL: a hundred years."""

Verdict = Literal["transient", "permanent", "business", "cancel"]
VERDICTS: tuple[Verdict, ...] = ("transient", "permanent", "business", "cancel")
ExceptionMapping = Mapping[type[BaseException], Verdict]

OWN: ExceptionMapping = {
    TransientCommandError: "transient",
    PermanentCommandError: "permanent",
    BusinessRuleError: "business",
    CommandCanceled: "cancel",
}


def is_between(value: object, least: float, most: float) -> bool:
    """Whether it is a number, and no other than these."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a command is tried, and how long it waits (in seconds) before each further attempt.

    After attempt n it waits `backoff[n-1]`; the last value repeats. `jitter=0.1` varies each wait by up to ±10 %.
    """

    max_attempts: int = 3
    backoff: tuple[float, ...] = (10, 60, 300)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        attempts, backoff, jitter = self.max_attempts, self.backoff, self.jitter
        if not isinstance(attempts, int) or not is_between(attempts, 1, MOST_ATTEMPTS):
            raise ConfigurationError(f"max_attempts must be from 1 to {MOST_ATTEMPTS}, not {attempts!r}")
        if not isinstance(backoff, list | tuple) or not backoff or not all(is_between(s, 0, LONGEST) for s in backoff):
            raise ConfigurationError(f"backoff must be a list of waits of 0 to {LONGEST} seconds, not {backoff!r}")
        if not is_between(jitter, 0, 1):
            raise ConfigurationError(f"jitter must be between 0 and 1, not {jitter!r}")
        object.__setattr__(self, "backoff", tuple(backoff))

    def delay(self, attempt: int) -> float:
        seconds = float(self.backoff[min(attempt, len(self.backoff)) - 1])
        if self.jitter:
            seconds *= 1 + random.uniform(-self.jitter, self.jitter)  # noqa: S311 - not for secrets
        return seconds


@dataclass(frozen=True, slots=True)
class Retry:
    delay: float


@dataclass(frozen=True, slots=True)
class Troubleshoot:
    pass


@dataclass(frozen=True, slots=True)
class End:
    status: Status


Decision = Retry | Troubleshoot | End


@dataclass(frozen=True, slots=True)
class Classifier:
    """Says which verdict an exception gets: ours by their class, others by the mapping, the rest are transient."""

    mapping: ExceptionMapping = field(default_factory=dict)

    def verdict(self, error: BaseException) -> Verdict:
        for cls in type(error).__mro__:
            found = OWN.get(cls) or self.mapping.get(cls)
            if found is not None:
                return found
        return "transient"

    def decide(self, error: BaseException, attempt: int, policy: RetryPolicy) -> Decision:
        """Whether an attempt is left is for the database to say: it knows the limit stored with the command."""
        verdict = self.verdict(error)
        match verdict:
            case "transient":
                return Retry(policy.delay(attempt))
            case "permanent":
                return Troubleshoot()
            case "business":
                return End(Status.FAILED)
            case "cancel":
                return End(Status.CANCELED)
            case _:
                assert_never(verdict)
