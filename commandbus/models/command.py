from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar
from uuid import UUID

from django.contrib.postgres.indexes import BrinIndex
from django.db import connections, models
from django.db.models import Case, F, OuterRef, Q, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from commandbus import messages
from commandbus.messages import Status

# As plain text: migrations must not depend on our classes.
LIVE = [status.value for status in messages.LIVE]
RARE = [status.value for status in messages.RARE]
TERMINAL = [status.value for status in messages.TERMINAL]
ALL = [status.value for status in Status]


class CommandQuerySet(models.QuerySet["Command"]):
    def with_status(self, domain: str, status: Status) -> CommandQuerySet:
        """Found soon, however many of other statuses there are: no index has all of them."""
        commands = self.filter(domain=domain)
        if status in RARE:
            return commands.filter(rare_status=status.value)
        if status in LIVE and (rows := self._live_rows(domain)) is not None:
            commands = self.filter(id__in=rows)  # without the domain, which might tempt to another index
        return commands.filter(status=status.value)  # the newest are soon met, if they are many

    def one(self, domain: str | OuterRef, command_id: UUID) -> CommandQuerySet:
        """One or none. Order and limit leave only one index to choose: see commandbus.rows_of."""
        # A name that PostgreSQL sees only when it runs: it opens no way to the index of types.
        unseen = RawSQL("SELECT %s", [domain]) if isinstance(domain, str) else domain
        found = self.filter(domain=unseen, command_id__range=(command_id, command_id))
        return found.order_by("command_id")[:1]

    def these(self, domain: str, command_ids: Iterable[UUID]) -> CommandQuerySet:
        """Looked up one by one, however many others there are."""
        with connections[self.db].cursor() as cursor:
            cursor.execute("SELECT commandbus.rows_of(%s, %s)", [domain, list(command_ids)])
            [rows] = cursor.fetchone()
        return self.filter(id__in=[row for row in rows if row is not None])

    def _live_rows(self, domain: str) -> list[int] | None:
        """None if they are many."""
        with connections[self.db].cursor() as cursor:
            cursor.execute("SELECT commandbus.live_rows(%s)", [domain])
            rows: list[int] | None = cursor.fetchone()[0]
        return rows

    def troubleshooting(self, domain: str) -> CommandQuerySet:
        """What waits for an operator."""
        return self.with_status(domain, Status.IN_TROUBLESHOOTING_QUEUE)


class Command(models.Model):
    """What is known of a command. Only the SQL functions of `commandbus/sql` change it."""

    domain = models.TextField()
    queue_name = models.TextField()
    msg_id = models.BigIntegerField(null=True)
    command_id = models.UUIDField()
    command_type = models.TextField()
    status = models.TextField(choices=[(status, status) for status in ALL])
    attempts = models.IntegerField(db_default=0)
    max_attempts = models.IntegerField()

    # The lease: (msg_id, lease_read_ct) is its token. Set while a worker holds the command, whatever `status` shows.
    lease_read_ct = models.IntegerField(null=True)
    lease_expires_at = models.DateTimeField(null=True)
    node_id = models.UUIDField(null=True)

    # Whether it may have killed a process, so that it runs alone; and how many such runs died, seen by a supervisor or
    # together with it.
    suspect = models.BooleanField(db_default=False)
    crash_count = models.SmallIntegerField(db_default=0)
    vanished_count = models.SmallIntegerField(db_default=0)

    last_error_type = models.TextField(null=True)
    last_error_code = models.TextField(null=True)
    last_error_msg = models.TextField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    reply_queue = models.TextField(null=True, help_text="None for the handling of a reply: nobody waits for an answer")
    correlation_id = models.UUIDField()
    content_hash = models.BinaryField(max_length=32)
    unique_globally = models.BooleanField(db_default=False)
    # commandbus.send has locked the batch when it writes this. A constraint would look it up again for each command,
    # and call its trigger for each that has none.
    batch = models.ForeignKey(
        "commandbus.Batch", models.DO_NOTHING, null=True, db_index=False, db_constraint=False, related_name="commands"
    )
    answer = models.JSONField(null=True, help_text="What the reply says beyond this row: its data and its error")

    # An index that mentions `status` would make every status change write all indexes again (no HOT update). This
    # column changes only when a command leaves the usual path, so the index on it costs the usual path nothing.
    rare_status = models.GeneratedField(
        expression=Case(When(status__in=RARE, then=F("status")), default=Value(None)),
        output_field=models.TextField(null=True),
        db_persist=True,
    )

    objects = CommandQuerySet.as_manager()

    class Meta:
        db_table = "command_bus_command"
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("retry_command", "Can retry commands of the Troubleshooting Queue"),
            ("cancel_command", "Can cancel commands"),
            ("complete_command", "Can complete commands of the Troubleshooting Queue by hand"),
            ("edit_command_payload", "Can change the data of commands and retry them"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["domain", "command_id"], name="uq_command_bus_command_domain_cmdid"),
            models.UniqueConstraint(
                fields=["command_id"], condition=Q(unique_globally=True), name="uq_command_bus_command_cmdid_global"
            ),
            models.CheckConstraint(condition=Q(status__in=ALL), name="ck_command_bus_command_status"),
            models.CheckConstraint(
                condition=Q(attempts__gte=0, max_attempts__gte=1, crash_count__gte=0, vanished_count__gte=0),
                name="ck_command_bus_command_counts",
            ),
            models.CheckConstraint(
                condition=Q(lease_read_ct=None, lease_expires_at=None)
                | Q(lease_read_ct__isnull=False, lease_expires_at__isnull=False, msg_id__isnull=False, status__in=LIVE),
                name="ck_command_bus_command_lease",
            ),
            models.CheckConstraint(
                condition=~Q(status=Status.IN_PROGRESS.value) | Q(lease_read_ct__isnull=False),
                name="ck_command_bus_command_in_progress",
            ),
            models.CheckConstraint(
                condition=Q(answer=None) | Q(status__in=TERMINAL), name="ck_command_bus_command_answer"
            ),
        ]
        indexes: ClassVar = [
            # The condition holds for all. Who looks for an id alone does not say it, and never walks along this index.
            models.Index(
                fields=["domain", "command_type", "id"], name="ix_command_bus_command_type", condition=Q(domain__gte="")
            ),
            models.Index(
                fields=["rare_status", "domain", "command_type", "id"],
                name="ix_command_bus_command_rare",
                condition=Q(rare_status__isnull=False),
            ),
            # Written only when something has failed, or is part of a chain.
            models.Index(
                fields=["last_error_code", "id"],
                name="ix_command_bus_command_code",
                condition=Q(last_error_code__isnull=False),
            ),
            models.Index(
                fields=["last_error_type", "id"],
                name="ix_command_bus_command_error",
                condition=Q(last_error_type__isnull=False),
            ),
            models.Index(
                fields=["correlation_id", "id"],
                name="ix_command_bus_command_corr",
                condition=~Q(correlation_id=F("command_id")),
            ),
            models.Index(fields=["batch", "id"], name="ix_command_bus_command_batch", condition=Q(batch__isnull=False)),
            models.Index(
                fields=["batch", "rare_status", "id"],
                name="ix_command_bus_command_btrare",
                condition=Q(batch__isnull=False, rare_status__isnull=False),
            ),
            BrinIndex(fields=["created_at"], name="ix_command_bus_command_created", autosummarize=True),
            BrinIndex(fields=["updated_at"], name="ix_command_bus_command_updated", autosummarize=True),
        ]

    def __str__(self) -> str:
        return f"{self.command_type} {self.command_id}"

    @property
    def reply(self) -> dict[str, Any] | None:
        """What was sent when the command ended; None before that. (`commandbus.reply_of` says the same in SQL.)"""
        if self.status not in TERMINAL:
            return None
        return {
            "command_id": str(self.command_id),
            "correlation_id": str(self.correlation_id),
            "domain": self.domain,
            "type": f"{self.command_type}Response",
            "outcome": "SUCCESS" if self.status == Status.COMPLETED else self.status,
            "completed_at": self.updated_at.isoformat(),
            **(self.answer or {"data": {}, "error": None}),
        }


class TroubledCommand(Command):
    """What waits for an operator, as an entry of its own in the admin."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = "command in trouble"
        verbose_name_plural = "troubleshooting"
