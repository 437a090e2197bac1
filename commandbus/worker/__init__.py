"""Workers: fetch, execute, finish."""

from commandbus.worker.worker import Worker, WorkerOptions

__all__ = ["Worker", "WorkerOptions"]
