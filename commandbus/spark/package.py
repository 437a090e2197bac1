"""commandbus as a zip that Spark ships to its executors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import commandbus
from commandbus.exceptions import ConfigurationError

ENTRY = '''"""spark-submit --py-files commandbus.zip commandbus_job.py send …"""

import sys

from commandbus.spark.cli import main

sys.exit(main())
'''


def build_zip(path: Path) -> Path:
    """Write the modules that run without Django: the package itself, ids, errors, texts, and commandbus.spark."""
    folder = Path(commandbus.__file__).parent
    if not folder.is_dir():
        raise ConfigurationError(f"commandbus is itself in a zip ({folder}), and Spark has that already")
    files = [folder / name for name in ("__init__.py", "exceptions.py", "ids.py", "text.py")]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted([*files, *(folder / "spark").glob("*.py")]):
            # The same content is the same file, whenever it is made.
            name = f"commandbus/{file.relative_to(folder)}"
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return path


def build_package(folder: Path) -> list[Path]:
    """What `spark-submit` takes: the zip, and a script that calls it."""
    script = folder / "commandbus_job.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(ENTRY)
        return [build_zip(folder / "commandbus.zip"), script]
    except OSError as error:
        raise ConfigurationError(f"the package cannot be written: {error}") from None
