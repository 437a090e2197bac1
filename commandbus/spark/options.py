"""The options of `format("commandbus")`, read once, on the driver."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import UUID, uuid5

from commandbus.exceptions import ConfigurationError
from commandbus.ids import uuid7

OnInvalid = Literal["fail", "reject"]
JOBS = UUID("b2a7a7a0-6a1c-5b6e-9a53-3f3f0f1c7d11")
"""The namespace of the ids that follow from a job's."""
LONGEST_PATIENCE = 24 * 3600.0
LONGEST_NAME = 255

OF_A_BATCH = ("batchName", "customData", "onCompleteType", "onCompleteData")
WRITING = (
    "url",
    "domain",
    "jobId",
    "commandType",
    "onInvalid",
    "atomic",
    *OF_A_BATCH,
    "chunkRows",
    "retrySeconds",
)
OF_SPARK = ("path", "checkpointLocation", "queryName")
"""What Spark itself may add."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    batch_id: UUID
    name: str
    custom_data: str | None = None
    on_complete: str | None = None
    """As commandbus.open_batch takes it."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    url: str
    domain: str
    job_id: str | None = None
    command_type: str | None = None
    on_invalid: OnInvalid = "fail"
    atomic: bool = False
    batch: BatchOptions | None = None
    chunk_rows: int = 2000
    retry_seconds: float = 60.0

    @classmethod
    def of(cls, options: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
        """Raises a ConfigurationError that names the option and the remedy."""
        given = known(options, WRITING)
        if is_stream:
            wrong = next((name for name in (*OF_A_BATCH, "atomic") if name in given), None)
            if wrong is not None:
                raise ConfigurationError(
                    f"the option {wrong} is not for streams, which have no end; "
                    f"use foreachBatch and write each DataFrame with it, under a jobId of its own"
                )
        if "batchName" in given and not given.get("jobId"):
            raise ConfigurationError(
                "a batch needs the option jobId: under the same id, a job that was stopped goes on and seals its "
                "batch; without one, it would begin another batch with the rest"
            )
        job_id = given.get("jobId") or (None if is_stream else str(uuid7()))
        domain = required(given, "domain", "payments")
        return cls(
            url=required(given, "url", "postgresql://user@host:5432/database"),
            domain=domain,
            job_id=job_id,
            command_type=None if "commandType" not in given else _name(given, "commandType"),
            on_invalid=_on_invalid(given.get("onInvalid", "fail")),
            atomic=_boolean("atomic", given.get("atomic", "false")),
            batch=_batch(given, domain, job_id or ""),
            chunk_rows=whole_number(given, "chunkRows", 2000, 100_000),
            retry_seconds=_seconds("retrySeconds", given.get("retrySeconds", "60")),
        )


def known(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The options as they are spelled here: Spark does not tell upper from lower case. An unknown one is an error."""
    spelled = {name.lower(): name for name in (*names, *OF_SPARK)}
    for name in options:
        if name.lower() not in spelled:
            close = difflib.get_close_matches(name.lower(), spelled, n=1)
            meant = f"; did you mean {spelled[close[0]]}?" if close else ";"
            raise ConfigurationError(f"there is no option {name!r}{meant} the options are {', '.join(names)}")
    return {spelled[name.lower()]: value for name, value in options.items()}


def required(given: Mapping[str, str], name: str, example: str) -> str:
    if not given.get(name):
        raise ConfigurationError(f'the option {name} is missing; add .option("{name}", "{example}")')
    return given[name]


def whole_number(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigurationError(f"the option {name} must be a number from 1 to {most:,}, not {text!r:.100}")
    return int(text)


def batch_id_of(domain: str, job_id: str) -> UUID:
    """The batch of a job: the same in every run of it."""
    return uuid5(JOBS, f"batch/{domain}/{job_id}")


def _batch(given: Mapping[str, str], domain: str, job_id: str) -> BatchOptions | None:
    if "batchName" not in given:
        wrong = next((name for name in OF_A_BATCH if name in given), None)
        if wrong is not None:
            raise ConfigurationError(f"the option {wrong} needs a batch; add the option batchName")
        return None
    custom_data = given.get("customData")
    if custom_data is not None:
        _object("customData", custom_data)
    return BatchOptions(
        batch_id=batch_id_of(domain, job_id),
        name=_name(given, "batchName"),
        custom_data=custom_data,
        on_complete=_on_complete(given, domain, job_id),
    )


def _on_complete(given: Mapping[str, str], domain: str, job_id: str) -> str | None:
    if "onCompleteType" not in given:
        if "onCompleteData" in given:
            raise ConfigurationError(
                "the option onCompleteData needs the option onCompleteType: the type of the command"
            )
        return None
    data = _object("onCompleteData", given.get("onCompleteData", "{}"))
    if "batch" in data:
        raise ConfigurationError(
            "the option onCompleteData has a key batch, which holds a summary of the batch; use another"
        )
    command = {
        "command_type": _name(given, "onCompleteType"),
        "command_id": str(uuid5(JOBS, f"on_complete/{domain}/{job_id}")),
        "data": data,
    }
    return json.dumps(command)


def _name(given: Mapping[str, str], option: str) -> str:
    if not 1 <= len(given[option]) <= LONGEST_NAME:
        count = len(given[option])
        raise ConfigurationError(f"the option {option} has {count} characters; 1 to {LONGEST_NAME} are allowed")
    return given[option]


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refused)
    except ValueError as error:
        raise ConfigurationError(f"the option {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"the option {name} must be a JSON object, not {text!r:.100}")
    return value


def _refused(constant: str) -> None:
    raise ValueError(f"there is {constant}, which only Python takes for JSON")


def _on_invalid(text: str) -> OnInvalid:
    if text in ("fail", "reject"):
        return cast(OnInvalid, text)
    raise ConfigurationError(f"the option onInvalid must be fail or reject, not {text!r:.100}")


def _boolean(name: str, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ConfigurationError(f"the option {name} must be true or false, not {text!r:.100}")


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_PATIENCE:
        raise ConfigurationError(f"the option {name} must be 0 to 86,400 seconds, not {text!r:.100}")
    return seconds
