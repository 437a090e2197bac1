"""What has to be installed, and how it is."""

from __future__ import annotations

import importlib

from commandbus.exceptions import ConfigurationError

OLDEST = (4, 1)
OLDEST_NAME = "4.1"
NEEDED = ("pyspark", "pyarrow", "psycopg")


def check_packages() -> None:
    """Raises a ConfigurationError that names what is missing or too old."""
    for name in NEEDED:
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f'{name} cannot be imported ({error}); install it: pip install "commandbus[spark]"'
            ) from None
        if name == "pyspark" and version_of(found.__version__) < OLDEST:
            raise ConfigurationError(
                f"pyspark {found.__version__} is installed, and commandbus needs {OLDEST_NAME} or newer: "
                f'pip install "commandbus[spark]"'
            )


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
