from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def megabytes() -> float:
    """The memory that this process takes now; where the system does not tell, the most that it ever took."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1024 * 1024 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1024 * 1024)
