from __future__ import annotations

from pathlib import Path

from django.utils import autoreload


class SourceFiles:
    """The files that the running code was loaded from, as Django's own development server finds them."""

    def __init__(self) -> None:
        self._reloader = autoreload.StatReloader()
        self._seen = self._times()

    def changed(self) -> list[Path]:
        """What has changed since the last call."""
        before, self._seen = self._seen, self._times()
        return [path for path, time in self._seen.items() if path in before and before[path] != time]

    def _times(self) -> dict[Path, float]:
        return dict(self._reloader.snapshot_files())
