"""commandbus and Spark: commands in millions, each sent exactly once. No Django: `pip install commandbus[spark]`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commandbus.spark.ids import derived_id, uuid5
    from commandbus.spark.jobs import Job
    from commandbus.spark.sending import send
    from commandbus.spark.spark_session import register, session

# They need pyspark; if something is missing, the error says how to install it.
_LATER = {
    "Job": "commandbus.spark.jobs",
    "derived_id": "commandbus.spark.ids",
    "register": "commandbus.spark.spark_session",
    "send": "commandbus.spark.sending",
    "session": "commandbus.spark.spark_session",
    "uuid5": "commandbus.spark.ids",
}

__all__ = ["Job", "derived_id", "register", "send", "session", "uuid5"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from commandbus.spark.packages import check_packages

        check_packages()
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'commandbus.spark' has no attribute {name!r}")
