from __future__ import annotations

import getpass
import json
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError
from django.db.models import F
from django.test import override_settings
from django.utils import timezone

from commandbus import audit_trail, ops, send_command
from commandbus.messages import ErrorInfo, Failure, Reason
from commandbus.models import Command
from commandbus.ops import get_payload
from commandbus.ops import troubleshooting as ops_troubleshooting
from commandbus.shell import actions, troubleshooting
from commandbus.transitions import PostgresTransitions
from tests.helpers import reload, result, send, status
from tests.shell.helpers import Ran, Terminal, run, type_in

pytestmark = pytest.mark.django_db

BUS = PostgresTransitions("default")
ERROR = ErrorInfo(
    "BankDown",
    "BANK_DOWN",
    "the bank\ndoes not answer",
    {"bank": "B\x1b1"},
    "Traceback (most recent call last):\n  File x\nBankDown: \x1b[31m no\n",
)
OTHER = ErrorInfo("ValueError", "BAD_AMOUNT", "amount is 'a lot', not a number" + 50 * "!")


def trouble(command_type: str = "PlaceOrder", error: ErrorInfo = ERROR, **data: Any) -> UUID:
    """A command in the Troubleshooting Queue."""
    command_id = send_command("orders", command_type, uuid4(), data)
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, error, reason=Reason.PERMANENT)])
    return command_id


def ids(ran: Ran) -> list[str]:
    return [line.split()[0] for line in ran.lines[1:] if line.count("-") >= 4]


def tsq(*arguments: str, **streams: Any) -> Ran:
    return run("commandbus_tsq", *arguments, **streams)


def test_the_list_has_the_newest_first_and_says_how_many_there_are() -> None:
    first, second = trouble(), trouble("SendMail", OTHER)
    Command.objects.filter(command_id=first).update(updated_at=F("updated_at") - timedelta(days=3))
    ran = tsq("list", "orders")
    assert ran.lines[0].split() == ["ID", "TYPE", "ATTEMPTS", "ERROR", "MESSAGE", "SINCE", "AGE"]
    assert ids(ran) == [str(second), str(first)]
    since = reload(first).updated_at.strftime("%Y-%m-%d %H:%M:%S")
    cells = [cell for cell in ran.lines[2].split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        *(str(first), "PlaceOrder", "1/3", "BANK_DOWN", "the bank does not answer", since, "3 d")
    ]
    assert "amount is 'a lot', not a number!!!!!!!!!!!!!!!!!!…" in ran.lines[1]
    assert ran.lines[-1] == "2 of 2"


def test_a_long_list_is_cut_and_so_is_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        trouble()
    assert tsq("list", "orders", "--limit", "2").lines[-1] == "2 of 4"
    monkeypatch.setattr(troubleshooting, "AT_MOST", 3)
    ran = tsq("list", "orders", "--limit", "2")
    assert ran.lines[-1] == "2 of 3+"
    found = json.loads(tsq("list", "orders", "--limit", "2", "--json").out)
    assert (len(found["commands"]), found["total"], found["more"]) == (2, 3, True)


def test_the_list_can_be_filtered() -> None:
    first, second = trouble(), trouble("SendMail", OTHER)
    Command.objects.filter(command_id=first).update(updated_at=timezone.now() - timedelta(days=3))
    yesterday = timezone.now() - timedelta(days=1)
    for option, value in [
        ("--type", "SendMail"),
        ("--error-type", "ValueError"),
        ("--error-code", "BAD_AMOUNT"),
        ("--since", yesterday.isoformat()),
        ("--since", yesterday.date().isoformat()),
    ]:
        assert ids(tsq("list", "orders", option, value)) == [str(second)], option
    assert ids(tsq("list", "orders", "--until", yesterday.isoformat())) == [str(first)]
    assert ids(tsq("list", "orders", "--until", yesterday.isoformat(), "--type", "SendMail")) == []


def test_a_time_without_a_zone_is_in_that_of_the_project() -> None:
    trouble()
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        now = timezone.localtime().replace(tzinfo=None)
        assert len(ids(tsq("list", "orders", "--since", (now - timedelta(minutes=1)).isoformat()))) == 1
        assert ids(tsq("list", "orders", "--since", (now + timedelta(minutes=1)).isoformat())) == []
        assert now.strftime("%Y-%m-%d %H:") in tsq("list", "orders").out


def test_an_empty_queue_says_so() -> None:
    assert tsq("list", "orders").out == "nothing is in the Troubleshooting Queue of orders\n"
    assert "nothing like that" in tsq("list", "orders", "--type", "X").out
    assert json.loads(tsq("list", "orders", "--json").out) == {"commands": [], "total": 0, "more": False}


def test_the_list_as_json() -> None:
    command_id = trouble()
    [found] = json.loads(tsq("list", "orders", "--json").out)["commands"]
    assert (found["command_id"], found["type"], found["status"]) == (
        *(str(command_id), "PlaceOrder", "IN_TROUBLESHOOTING_QUEUE"),
    )
    assert (found["error_code"], found["error_message"]) == ("BANK_DOWN", "the bank\ndoes not answer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "nowhere"], "domain 'nowhere' is not registered"),
        (["list", "orders", "--limit", "0"], "'0' is not a number from 1 on"),
        (["list", "orders", "--limit", "x"], "'x' is not a number from 1 on"),
        (["list", "orders", "--since", "yesterday"], "'yesterday' is no time like 2026-01-31"),
        (["show", "orders", "abc"], "'abc' is not the id of a command, which is a UUID"),
        (["show", "orders", str(UUID(int=1))], f"there is no command {UUID(int=1)} in domain orders; it may have been"),
        (["retry", "orders"], "say which commands to retry, in one of these ways: their ids; a filter (--type"),
        (["retry", "orders", str(UUID(int=1)), "--type", "X"], "in one of these ways"),
        (["cancel", "orders", "--reason", "x", "--all", "--type", "X"], "in one of these ways"),
        (["cancel", "orders", "--all"], "the following arguments are required: --reason"),
        (["cancel", "orders", "--all", "--yes", "--reason", " "], "needs a reason"),
        (["complete", "orders", "--all", "--result", "[1]"], "--result must be a JSON object"),
        (["edit", "orders", str(UUID(int=1))], "the following arguments are required: --data"),
        (["edit", "orders", str(UUID(int=1)), "--data", "{"], "--data is not JSON"),
        (["edit", "orders", str(UUID(int=1)), "--data", '{"a": "\\u0000"}'], "PostgreSQL cannot store"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments: list[str], words: str) -> None:
    trouble()
    ran = tsq(*arguments)
    assert ran.code == 1
    assert words in ran.err
    assert ran.out == ""
    assert Command.objects.get().status == "IN_TROUBLESHOOTING_QUEUE"


def test_show_has_the_data_the_last_error_and_the_history() -> None:
    command_id = trouble(amount=5, text="\x1b")
    ran = tsq("show", "orders", str(command_id))
    assert "\x1b" not in ran.out
    facts, data, error, history = ran.out.split("\n\n")
    assert f"command         {command_id}\n" in facts
    assert "attempts        1 of 3\n" in facts
    assert "reason          PERMANENT\n" in facts
    assert " ago)" in facts
    assert data.splitlines()[0] == "DATA"
    assert json.loads(data.removeprefix("DATA")) == {"amount": 5, "text": "\x1b"}
    assert error.startswith("LAST ERROR\nBANK_DOWN (BankDown)\nthe bank\ndoes not answer\n{\n")
    assert "Traceback (most recent call last):\n  File x\nBankDown: \\x1b[31m no" in error
    events = [line.split() for line in history.splitlines()]
    assert events[0] == ["HISTORY"]
    assert [event[2] if event[2].isupper() else event[4] for event in events[1:]] == [
        *("SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE")
    ]
    assert "BANK_DOWN: the bank does not answer, reason PERMANENT, attempt 1" in history
    assert "+0.0 s" in history


def test_show_takes_a_command_in_any_state() -> None:
    command_id = send()
    ran = tsq("show", "orders", str(command_id))
    assert "status          PENDING" in ran.out
    assert "LAST ERROR" not in ran.out
    assert "reason" not in ran.out
    [received] = BUS.receive("orders", qty=1, vt=30)
    BUS.fail("orders", [Failure(received.lease, ErrorInfo("E", "E", ""))])
    PostgresTransitions("default")._call("SELECT pgmq.purge_queue(%s)", ["orders__commands"])
    PostgresTransitions("default")._call("DELETE FROM pgmq.a_orders__commands RETURNING 1", [])
    assert "DATA\ngone\n" in tsq("show", "orders", str(command_id)).out


def test_show_as_json() -> None:
    command_id = trouble(amount=5)
    found = json.loads(tsq("show", "orders", str(command_id), "--json").out)
    assert found["command"]["command_id"] == str(command_id)
    assert found["data"] == {"amount": 5}
    assert found["error"]["traceback"].startswith("Traceback")
    assert [event["event"] for event in found["audit"]] == ["SENT", "RECEIVED", "MOVED_TO_TROUBLESHOOTING_QUEUE"]


def last_event(command_id: UUID) -> tuple[str, dict[str, Any]]:
    event = audit_trail("orders", command_id)[-1]
    return event.event_type, event.details_json or {}


def test_one_command_is_retried_without_a_question() -> None:
    command_id = trouble()
    ran = tsq("retry", "orders", str(command_id), "--operator", "alice", "--reason", "the bank is back")
    assert (ran.code, ran.out, ran.err) == (0, "done 1, refused 0\n", "")
    assert status(command_id) == "PENDING"
    event, details = last_event(command_id)
    assert (event, details["operator"], details["reason"]) == ("OPERATOR_RETRY", "alice", "the bank is back")


def test_a_canceled_command_has_the_reason_in_its_reply() -> None:
    command_id = trouble()
    assert tsq("cancel", "orders", str(command_id), "--reason", "not needed").code == 0
    assert status(command_id) == "CANCELED"
    reply = reload(command_id).reply
    assert reply is not None
    assert reply["error"]["message"] == "not needed"


def test_a_completed_command_has_the_result_in_its_reply(tmp_path: Path) -> None:
    with_result, without = trouble(), trouble()
    file = tmp_path / "result.json"
    file.write_text('{"booked": "by hand"}')
    assert tsq("complete", "orders", str(with_result), "--result", f"@{file}").code == 0
    assert tsq("complete", "orders", str(without)).code == 0
    assert (status(with_result), result(with_result)) == ("COMPLETED", {"booked": "by hand"})
    assert (status(without), result(without)) == ("COMPLETED", {})


def test_an_edited_command_is_sent_again_with_its_new_data(monkeypatch: pytest.MonkeyPatch) -> None:
    command_id = trouble(amount="a lot")
    type_in(monkeypatch, b'{"amount": 5}')
    ran = tsq("edit", "orders", str(command_id), "--data", "-", "--operator", "alice")
    assert (ran.code, ran.out) == (0, "done 1, refused 0\n")
    assert status(command_id) == "PENDING"
    assert get_payload("orders", command_id) == {"amount": 5}
    assert tsq("edit", "orders", str(command_id), "--data", "{}").err == f"{command_id}: its status is PENDING\n"


def test_what_is_refused_is_named_and_the_rest_is_done() -> None:
    troubled, waiting, unknown = trouble(), send(), UUID(int=7)
    ran = tsq("retry", "orders", str(troubled), str(waiting), str(unknown), str(troubled), "--yes")
    assert (ran.code, ran.out) == (1, "done 1, refused 2\n")
    assert f"{waiting}: its status is PENDING" in ran.err
    assert f"{unknown}: there is no such command in domain orders" in ran.err
    assert status(troubled) == "PENDING"


def test_of_many_that_are_refused_the_first_are_named() -> None:
    ran = tsq("retry", "orders", *(str(UUID(int=n)) for n in range(1, 26)), "--yes")
    assert ran.out == "done 0, refused 25\n"
    assert ran.err.count(": there is no such command") == 20
    assert ran.err.endswith("… and 5 more\n")


def test_a_filter_acts_on_all_that_match_and_on_nothing_else() -> None:
    bank, amount, other_type = trouble(), trouble(error=OTHER), trouble("SendMail")
    ran = tsq("retry", "orders", "--error-code", "BANK_DOWN", "--type", "PlaceOrder", "--yes")
    assert (ran.code, ran.out) == (0, "done 1, refused 0\n")
    assert [status(one) for one in (bank, amount, other_type)] == [
        *("PENDING", "IN_TROUBLESHOOTING_QUEUE", "IN_TROUBLESHOOTING_QUEUE")
    ]
    assert tsq("cancel", "orders", "--all", "--yes", "--reason", "over").out == "done 2, refused 0\n"
    ran = tsq("cancel", "orders", "--all", "--reason", "over")
    assert (ran.code, ran.out) == (0, "nothing like that is in the Troubleshooting Queue of orders\n")


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["retry", "orders", "--all"], "Retry 2 commands of orders?"),
        (["complete", "orders", "--type", "SendMail"], "Complete 1 command of orders?"),
        (["cancel", "orders", "IDS", "--reason", "x"], "Cancel 2 commands of orders?"),
    ],
)
@pytest.mark.parametrize("answer", ["y\n", "YES\n", "n\n", "\n", ""])
def test_more_than_one_or_a_filter_asks_first(
    monkeypatch: pytest.MonkeyPatch, words: list[str], question: str, answer: str
) -> None:
    both = [str(trouble()), str(trouble("SendMail"))]
    arguments = [word for given in words for word in (both if given == "IDS" else [given])]
    type_in(monkeypatch, answer.encode(), terminal=True)
    ran = tsq(*arguments)
    assert ran.err.startswith(f"{question} [y/N] ")
    left = Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count()
    if answer.strip().lower() in ("y", "yes"):
        assert (ran.code, left) == (0, 2 - int(question.split()[1]))
    else:
        assert (ran.code, left) == (1, 2)
        assert "nothing was done" in ran.err


def test_without_a_terminal_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    command_id = trouble()
    type_in(monkeypatch, b"y\n")
    ran = tsq("retry", "orders", "--all")
    assert ran.code == 1
    assert "Retry 1 command of orders? Nobody can be asked" in ran.err
    assert "add --yes" in ran.err
    assert status(command_id) == "IN_TROUBLESHOOTING_QUEUE"


def test_what_comes_in_while_the_question_is_open_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = trouble()
    late: list[UUID] = []
    monkeypatch.setattr(actions, "ask", lambda *_: late.append(trouble()))
    assert tsq("retry", "orders", "--all").out == "done 1, refused 0\n"
    assert (status(agreed), status(late[0])) == ("PENDING", "IN_TROUBLESHOOTING_QUEUE")


def test_a_dry_run_says_how_many_and_shows_the_first_ten() -> None:
    troubled = [str(trouble()) for _ in range(12)]
    ran = tsq("cancel", "orders", "--all", "--reason", "x", "--dry-run")
    assert ran.code == 0
    assert ran.lines[0] == "would cancel 12 commands of orders"
    assert ids(ran) == troubled[:10]
    assert ran.lines[-1] == "… and 2 more"
    assert Command.objects.filter(status="IN_TROUBLESHOOTING_QUEUE").count() == 12


def test_a_dry_run_with_ids_says_which_would_be_refused() -> None:
    troubled, waiting = trouble(), send()
    ran = tsq("retry", "orders", str(waiting), str(troubled), "--dry-run")
    assert (ran.code, ids(ran)) == (1, [str(troubled)])
    assert ran.lines[0] == "would retry 1 command of orders"
    assert ran.err == f"{waiting}: it is not in the Troubleshooting Queue\n"
    ran = tsq("edit", "orders", str(waiting), "--data", "{}", "--dry-run")
    assert (ran.code, ran.out) == (1, "would edit 0 commands of orders\n")
    assert status(troubled) == "IN_TROUBLESHOOTING_QUEUE"


def test_many_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_troubleshooting, "CHUNK", 1)
    trouble(), trouble()
    ran = tsq("retry", "orders", "--all", "--yes", stderr=Terminal())
    assert "[###############               ]  50 %  1 command, " in ran.err
    assert "] 100 %  2 commands, " in ran.err


def test_verbosity_0_is_silent_but_for_what_was_refused() -> None:
    troubled, waiting = trouble(), send()
    ran = tsq("retry", "orders", str(troubled), str(waiting), "--yes", "-v", "0")
    assert (ran.code, ran.out, ran.err) == (1, "", f"{waiting}: its status is PENDING\n")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; 1 of 3 commands were dealt with, and that stays"),
        (OperationalError("gone\n"), 1, "stopped: gone; 1 of 3 commands were dealt with, and that stays"),
    ],
)
def test_whatever_stops_it_what_was_done_stays(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    troubled = [trouble() for _ in range(3)]
    monkeypatch.setattr(ops_troubleshooting, "CHUNK", 1)
    real: Callable[..., Any] = PostgresTransitions.operator_retry

    def fail(self: PostgresTransitions, domain: str, command_ids: Sequence[UUID], *rest: Any, **more: Any) -> Any:
        if command_ids == [troubled[1]]:
            raise error
        return real(self, domain, command_ids, *rest, **more)

    monkeypatch.setattr(PostgresTransitions, "operator_retry", fail)
    ran = tsq("retry", "orders", "--all", "--yes")
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
    assert [status(one) for one in troubled[:2]] == ["PENDING", "IN_TROUBLESHOOTING_QUEUE"]


def test_ctrl_c_waits_for_what_is_being_done_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled = [trouble() for _ in range(3)]
    monkeypatch.setattr(ops_troubleshooting, "CHUNK", 1)
    real: Callable[..., Any] = PostgresTransitions.operator_retry

    def interrupt(self: PostgresTransitions, domain: str, command_ids: Sequence[UUID], *rest: Any, **more: Any) -> Any:
        if command_ids == [troubled[1]]:
            signal.raise_signal(signal.SIGINT)
        return real(self, domain, command_ids, *rest, **more)

    monkeypatch.setattr(PostgresTransitions, "operator_retry", interrupt)
    ran = tsq("retry", "orders", "--all", "--yes")
    assert ran.code == 130
    assert "interrupted; 2 of 3 commands were dealt with, and that stays" in ran.err
    assert [status(one) for one in troubled] == ["PENDING", "PENDING", "IN_TROUBLESHOOTING_QUEUE"]


def test_the_operator_is_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise OSError("no terminal")

    def unknown() -> str:
        raise KeyError("uid not found")

    first, second, third = trouble(), trouble(), trouble()
    monkeypatch.setattr(os, "getlogin", lambda: "alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    tsq("retry", "orders", str(first))
    assert last_event(first)[1]["operator"] == "alice"
    monkeypatch.setattr(os, "getlogin", nobody)
    tsq("retry", "orders", str(second))
    assert last_event(second)[1]["operator"] == "root"
    monkeypatch.setattr(getpass, "getuser", unknown)
    ran = tsq("retry", "orders", str(third))
    assert "the system does not say who you are; add --operator NAME" in ran.err
    assert status(third) == "IN_TROUBLESHOOTING_QUEUE"


@pytest.mark.parametrize("position", [0, 2])
def test_what_every_command_of_django_takes_may_stand_before_or_after_the_action(position: int) -> None:
    words = ["retry", "orders", str(trouble())]
    words[position:position] = ["--verbosity", "0", "--settings", "tests.settings"]
    assert tsq(*words).out == ""


def test_ids_may_stand_behind_options_as_xargs_writes_them() -> None:
    first, second = trouble(), trouble()
    ran = tsq("cancel", "orders", "--yes", str(first), "--reason", "over", str(second))
    assert (ran.code, ran.out) == (0, "done 2, refused 0\n")
    assert "unrecognized arguments: --often" in tsq("retry", "orders", "--often", str(first)).err


def test_ops_says_what_is_in_troubleshooting() -> None:
    first, second, waiting = trouble(), trouble(error=OTHER), send()
    assert [one.command_id for one in ops.in_troubleshooting("orders").order_by("id")] == [first, second]
    assert [one.command_id for one in ops.in_troubleshooting("orders", [second, waiting])] == [second]
    wanted = ops.TroubleshootingFilter(error_code="BANK_DOWN")
    assert [one.command_id for one in ops.in_troubleshooting("orders", wanted)] == [first]
