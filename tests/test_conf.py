from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.core.checks import Error, run_checks
from django.test import override_settings
from psycopg import IsolationLevel

from commandbus import conf
from commandbus.exceptions import ConfigurationError
from commandbus.install import register_domains
from commandbus.policies import RetryPolicy


def errors() -> list[str]:
    return [message.msg for message in run_checks() if isinstance(message, Error)]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"DOMAIN": []}, "COMMANDBUS['DOMAIN'] is not a setting"),
        ({"DOMAINS": "payments"}, "must be a list of domain names"),
        ({"DOMAINS": ["Payments"]}, "domain name 'Payments' is not valid"),
        ({"DOMAINS": ["pay.ments"]}, "domain name 'pay.ments' is not valid"),
        ({"DOMAINS": [7]}, "domain name 7 is not valid"),
        ({"DOMAINS": ["x" * 36]}, "has 36 characters; at most 35 fit"),
        ({"DATABASES": {"payments": "nowhere"}}, "'nowhere' is not in DATABASES"),
        ({"DATABASES": {"PAY": "default"}}, "domain name 'PAY' is not valid"),
        ({"DATABASES": ["payments"]}, "must be a dict of names"),
        ({"UNIQUE_SCOPE": "universe"}, "must be one of domain, global"),
        ({"MARK_IN_PROGRESS": "yes"}, "must be True or False"),
        ({"RESET_ATTEMPTS_ON_OPERATOR_RETRY": 1}, "must be True or False"),
        ({"PAYLOAD_ARCHIVE": None}, "must be True or False"),
        ({"REPLY_QUEUE": "Replies!"}, "reply queue 'Replies!' is not valid"),
        ({"REPLY_QUEUE": "payments__commands"}, "collides with a queue"),
        ({"RETRY_POLICY": {"max_attempts": 0}}, "max_attempts must be from 1 to 1000000, not 0"),
        ({"RETRY_POLICY": {"max_attempts": 2**40}}, "not 1099511627776"),
        ({"RETRY_POLICY": {"max_attempts": True}}, "not True"),
        (
            {"RETRY_POLICY": {"backoff": 5}},
            "backoff must be a list of waits of 0 to 3155760000 seconds, not 5",
        ),
        ({"RETRY_POLICY": {"backoff": (1, 1e300)}}, "not (1, 1e+300)"),
        ({"RETRY_POLICY": {"jitter": "x"}}, "jitter must be between 0 and 1, not 'x'"),
        ({"REPLY_QUEUE": "r" * 48}, "use at most 47"),
        ({"CRASH_LIMIT": 0}, "COMMANDBUS['CRASH_LIMIT'] is 0: it must be a number from 1 to 1000"),
        ({"UNKNOWN_TYPE_GRACE": -1}, "COMMANDBUS['UNKNOWN_TYPE_GRACE'] is -1"),
        ({"HANDLERS_MODULE": "class"}, "COMMANDBUS['HANDLERS_MODULE'] is 'class'"),
        ({"RETRY_POLICY": {"tries": 3}}, "tries"),
        ({"RETRY_POLICY": 3}, "must be a RetryPolicy or a dict"),
        ({"EXCEPTIONS": {"no.such.Error": "transient"}}, "no"),
        ({"EXCEPTIONS": {"json.dumps": "transient"}}, "'json.dumps' is not an exception class"),
        ({"EXCEPTIONS": {"builtins.KeyError": "fatal"}}, "the verdict 'fatal'"),
        ({"EXCEPTIONS": ["builtins.KeyError"]}, "must be a dict of exception names"),
        ({"MAX_PAYLOAD_BYTES": -1}, "must be a number of bytes"),
        ({"HANDLERS_MODULE": "my handlers"}, "must be the name of a module"),
        ({"NOTIFY": "loudly"}, "must be one of after_commit, in_transaction, off"),
        ({"LISTEN_DATABASES": {"nowhere": "default"}}, "'nowhere' is not in DATABASES"),
        ([], "COMMANDBUS must be a dict"),
    ],
)
def test_manage_check_names_the_wrong_setting(setting: Any, words: str) -> None:
    with override_settings(COMMANDBUS=setting):
        assert any(words in error for error in errors()), errors()
        with pytest.raises(ConfigurationError):
            conf.current()


@pytest.mark.parametrize("queue", ["audit1", "orders"])  # of the settings, of a handler
def test_a_reply_queue_is_no_domain(queue: str) -> None:
    with override_settings(COMMANDBUS={"REPLY_QUEUE": queue, "DOMAINS": ["audit1"]}):
        assert errors() == [
            f"COMMANDBUS['REPLY_QUEUE'] is '{queue}', which is also a domain; choose another name for it"
        ]
        with pytest.raises(ConfigurationError, match=queue):
            register_domains("default")


def test_the_settings_of_the_tests_are_right() -> None:
    assert errors() == []


def test_everything_can_be_set() -> None:
    with override_settings(
        COMMANDBUS={
            "DOMAINS": ["payments"],
            "DATABASES": {"payments": "default"},
            "UNIQUE_SCOPE": "global",
            "MARK_IN_PROGRESS": False,
            "RESET_ATTEMPTS_ON_OPERATOR_RETRY": False,
            "PAYLOAD_ARCHIVE": True,
            "REPLY_QUEUE": "replies",
            "RETRY_POLICY": {"max_attempts": 5, "backoff": [1, 2]},
            "EXCEPTIONS": {"builtins.KeyError": "permanent"},
            "MAX_PAYLOAD_BYTES": 1000,
            "HANDLERS_MODULE": "commands",
            "NOTIFY": "off",
            "LISTEN_DATABASES": {"default": "default"},
        }
    ):
        config = conf.current()
    assert config.retry_policy == RetryPolicy(max_attempts=5, backoff=(1, 2))
    assert config.exceptions == {KeyError: "permanent"}
    assert config.database_of("payments") == "default"
    assert config.listen_database_of("default") == "default"


def test_a_policy_object_is_a_policy() -> None:
    with override_settings(COMMANDBUS={"RETRY_POLICY": RetryPolicy(max_attempts=9), "REPLY_QUEUE": None}):
        assert conf.current().retry_policy.max_attempts == 9


def test_a_database_of_another_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.DATABASES, "default", {"ENGINE": "django.db.backends.sqlite3"})
    assert any("commandbus needs PostgreSQL" in error for error in errors())


def test_an_isolation_level_that_we_do_not_support_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"isolation_level": IsolationLevel.SERIALIZABLE}
    monkeypatch.setitem(settings.DATABASES, "default", {"ENGINE": "django.db.backends.postgresql", "OPTIONS": options})
    assert any("needs READ COMMITTED" in error for error in errors())
