"""For the tests of applications: a bus in memory, and (as a pytest plugin) fixtures for the real one."""

from commandbus.testing.memory import InMemoryBus
from commandbus.testing.pgmq import FakePgmqClient
from commandbus.testing.run import run_pending

__all__ = ["FakePgmqClient", "InMemoryBus", "run_pending"]
