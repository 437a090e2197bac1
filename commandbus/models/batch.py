from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar
from uuid import UUID

from django.db import models
from django.db.models import F, OuterRef, Q, Subquery
from django.db.models.functions import Now

from commandbus.messages import BatchMetadata, BatchStatus

# As plain text: migrations must not depend on our classes.
ENDED = [BatchStatus.COMPLETED.value, BatchStatus.COMPLETED_WITH_FAILURES.value]
ALL = [status.value for status in BatchStatus]


class BatchNow(models.Func):
    function = "commandbus.batch_now"
    output_field = models.JSONField()


class BatchQuerySet(models.QuerySet["Batch"]):
    def in_need_of_repair(self, domain: str) -> BatchQuerySet:
        """Those whose counts may still change, or whose on_complete command could not be sent."""
        begun = [BatchStatus.PENDING.value, BatchStatus.IN_PROGRESS.value]
        return self.filter(Q(status__in=begun) | Q(callback_error__isnull=False), domain=domain)

    def with_status(self, status: BatchStatus) -> BatchQuerySet:
        """As they are now: some may have started and not be folded yet."""
        beginnings = BatchDelta.objects.filter(batch_id=OuterRef("batch_id"), started_at__isnull=False)
        batches = self.alias(begun=Subquery(beginnings.values("started_at")[:1]))  # not Exists: see commandbus.rows_of
        if status is BatchStatus.PENDING:
            return batches.filter(begun__isnull=True, status=status.value)
        if status is BatchStatus.IN_PROGRESS:
            return batches.filter(Q(status=status.value) | Q(status=BatchStatus.PENDING.value) & Q(begun__isnull=False))
        return self.filter(status=status.value)

    def as_they_are(self) -> list[BatchMetadata]:
        """With all that was counted until this moment."""
        return [BatchMetadata.from_json(now) for now in self.values_list(BatchNow(F("batch_id")), flat=True)]


class Batch(models.Model):
    """Commands that are counted together. Only the SQL functions of `commandbus/sql` change it.

    The counts are those that `commandbus.fold_batches` has added up so far.
    """

    batch_id = models.UUIDField(primary_key=True)
    domain = models.TextField()
    name = models.TextField(null=True)
    custom_data = models.JSONField(null=True)
    status = models.TextField(choices=[(status, status) for status in ALL])
    expected_count = models.IntegerField(null=True, help_text="How many commands it shall have when it is sealed")
    total_count = models.IntegerField(db_default=0)
    completed_count = models.IntegerField(db_default=0)
    failed_count = models.IntegerField(db_default=0)
    canceled_count = models.IntegerField(db_default=0)
    in_troubleshooting_count = models.IntegerField(db_default=0)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now(), help_text="When something was last counted")
    sealed_at = models.DateTimeField(null=True, help_text="Since when it takes no more commands")
    started_at = models.DateTimeField(null=True, help_text="When the first of its commands was received")
    canceled_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True, help_text="When it was sealed and all of its commands had ended")
    on_complete = models.JSONField(null=True, help_text="The command that is sent when it completes")
    callback_sent_at = models.DateTimeField(null=True)
    callback_error = models.TextField(null=True, help_text="Why that command could not be sent")

    objects = BatchQuerySet.as_manager()

    class Meta:
        db_table = "command_bus_batch"
        default_permissions = ("view",)
        verbose_name_plural = "batches"
        permissions: ClassVar = [
            ("cancel_batch", "Can cancel batches"),
            ("retry_batch", "Can retry the commands of a batch that are in the Troubleshooting Queue"),
            ("seal_batch", "Can seal open batches"),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(status__in=ALL), name="ck_command_bus_batch_status"),
            models.CheckConstraint(
                condition=Q(completed_at=None) & ~Q(status__in=ENDED)
                | Q(completed_at__isnull=False, sealed_at__isnull=False, status__in=ENDED),
                name="ck_command_bus_batch_completed",
            ),
        ]
        # None has a column that changes when something is counted, so that folding writes no index.
        indexes: ClassVar = [
            models.Index(fields=["domain", "-created_at"], name="ix_command_bus_batch_created"),
            models.Index(fields=["domain", "status", "-created_at"], name="ix_command_bus_batch_status"),
            models.Index(
                fields=["domain", "completed_at"],
                name="ix_command_bus_batch_completed",
                condition=Q(completed_at__isnull=False),
            ),
            models.Index(
                fields=["domain"], name="ix_command_bus_batch_callback", condition=Q(callback_error__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return self.name or str(self.batch_id)


class BatchDeltaQuerySet(models.QuerySet["BatchDelta"]):
    def batches_in(self, domains: Iterable[str]) -> set[UUID]:
        """The batches of these domains that have some."""
        wanted = set(domains)
        counted = self.values_list("batch_id", flat=True).distinct()
        domain_of = dict(
            Batch.objects.using(self.db).filter(batch_id__in=list(counted)).values_list("batch_id", "domain")
        )
        return {batch_id for batch_id, domain in domain_of.items() if domain in wanted}


class BatchDelta(models.Model):
    """What was counted in a batch and is not folded yet: commandbus/sql/batch_counts.sql."""

    pk = models.CompositePrimaryKey("batch_id", "id")
    batch_id = models.UUIDField()
    id = models.BigIntegerField()
    total_count = models.IntegerField(db_default=0)
    completed_count = models.IntegerField(db_default=0)
    failed_count = models.IntegerField(db_default=0)
    canceled_count = models.IntegerField(db_default=0)
    in_troubleshooting_count = models.IntegerField(db_default=0)
    started_at = models.DateTimeField(null=True)
    at = models.DateTimeField()

    objects = BatchDeltaQuerySet.as_manager()

    class Meta:
        db_table = "command_bus_batch_delta"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.batch_id}/{self.id}"
