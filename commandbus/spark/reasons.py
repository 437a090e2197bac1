"""What Spark means, of all that it says."""

from __future__ import annotations

import re

CAUSE = re.compile(
    r"^(?:\S+: )?Caused by: (?:\S+: )?([^\n]+(?:\n(?!\s+at |\s+\.\.\.|Caused by: |\S+: Caused by)[^\n]+)*)",
    re.MULTILINE,
)
CONDITION = re.compile(r"\[[A-Z][A-Z_.]+\] [^\n]+")
RAISED = re.compile(r"^: (?:[\w.$]+: )?([^\n]+)", re.MULTILINE)
"""In Java, as Python tells it below a line of its own."""


def reason(error: Exception) -> str:
    """One line: the last of the causes, for they come last."""
    text = str(error).strip()
    for pattern in (CAUSE, CONDITION, RAISED):
        if found := pattern.findall(text):
            return "; ".join(line.strip() for line in str(found[-1]).splitlines())[:1000]
    return text.partition("\n")[0] or type(error).__name__
