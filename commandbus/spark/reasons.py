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


QUOTE = re.compile(
    r"(?:Unexpected|Unescaped quote) character .{1,5} (?:following|inside) quoted value.*?line=(\d+)", re.S
)
"""In CSV. The first line is number 0."""
FILE = re.compile(r"while reading file (\S+?)\.?\s")


def reason(error: Exception) -> str:
    """One line: the last of the causes, for they come last."""
    text = str(error).strip()
    if found := QUOTE.search(text):
        file = FILE.search(text)
        where = f"{file[1]}: " if file else ""
        line = int(found[1]) + 1
        return f"{where}a quote is not closed, or stands in a cell and is not doubled, in line {line:,} or before it"
    for pattern in (CAUSE, CONDITION, RAISED):
        if causes := pattern.findall(text):
            return "; ".join(line.strip() for line in str(causes[-1]).splitlines())[:1000]
    return text.partition("\n")[0] or type(error).__name__
