from __future__ import annotations

from typing import Any

import pytest

from commandbus.exceptions import (
    BusinessRuleError,
    CommandCanceled,
    ConfigurationError,
    PermanentCommandError,
    TransientCommandError,
)
from commandbus.messages import Status
from commandbus.policies import Classifier, Decision, End, Retry, RetryPolicy, Troubleshoot

POLICY = RetryPolicy(max_attempts=5, backoff=(10, 60, 300))


@pytest.mark.parametrize(("attempt", "delay"), [(1, 10), (2, 60), (3, 300), (4, 300), (99, 300)])
def test_attempt_n_waits_the_nth_backoff_and_the_last_repeats(attempt: int, delay: float) -> None:
    assert POLICY.delay(attempt) == delay


def test_jitter_varies_the_wait_within_its_bounds() -> None:
    policy = RetryPolicy(backoff=(100,), jitter=0.1)
    delays = {policy.delay(1) for _ in range(50)}
    assert len(delays) > 1
    assert all(90 <= delay <= 110 for delay in delays)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"backoff": ()},
        {"backoff": (-1,)},
        {"backoff": (float("inf"),)},
        {"jitter": 2},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        RetryPolicy(**wrong)


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (TransientCommandError("X"), Retry(10)),
        (PermanentCommandError("X"), Troubleshoot()),
        (BusinessRuleError("X"), End(Status.FAILED)),
        (CommandCanceled("X"), End(Status.CANCELED)),
        (RuntimeError("anything else"), Retry(10)),
        (KeyError("mapped"), Troubleshoot()),
        (ZeroDivisionError("mapped by its base"), End(Status.FAILED)),
    ],
)
def test_the_exception_decides(error: Exception, decision: Decision) -> None:
    classifier = Classifier({KeyError: "permanent", ArithmeticError: "business"})
    assert classifier.decide(error, 1, POLICY) == decision


def test_handler_errors_read_well() -> None:
    assert str(TransientCommandError("BANK_DOWN", "no answer")) == "BANK_DOWN: no answer"
    assert str(TransientCommandError("BANK_DOWN")) == "BANK_DOWN"
