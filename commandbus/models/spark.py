from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

# As plain text: migrations must not depend on our classes.
RUNNING, COMPLETED, FAILED = "RUNNING", "COMPLETED", "FAILED"
ALL = [RUNNING, COMPLETED, FAILED]


class SparkJob(models.Model):
    """A DataFrame or a stream that is sent as commands. Only the SQL functions of `commandbus/sql` change it.

    The counts are those of what had ended when they were last folded: `commandbus.spark_job_now` adds the rest.
    """

    job_id = models.TextField(primary_key=True)
    domain = models.TextField()
    status = models.TextField(choices=[(status, status) for status in ALL])
    run = models.IntegerField(help_text="How often it was begun. What an earlier run still writes is refused")
    atomic = models.BooleanField(db_default=False, help_text="Whether the transaction that ends it sends it all")
    batch_id = models.UUIDField(null=True)
    completed_run = models.IntegerField(null=True, help_text="The last run that has completed")
    stream_query = models.TextField(null=True, help_text="The streaming query that it sends")
    stream_run = models.TextField(null=True, help_text="The run of the streaming query that has committed last")
    stream_batch = models.BigIntegerField(null=True, help_text="The micro-batch that it has committed last")
    committed_at = models.DateTimeField(null=True, help_text="When that was")
    row_count = models.BigIntegerField(db_default=0, help_text="Rows of the DataFrame, or of the stream so far")
    sent_count = models.BigIntegerField(db_default=0)
    sent_before = models.BigIntegerField(db_default=0, help_text="How many of these were sent by earlier runs")
    duplicate_count = models.BigIntegerField(
        db_default=0, help_text="Rows whose command was sent before, or stands there twice"
    )
    rejected_count = models.BigIntegerField(db_default=0, help_text="Rows that were set aside")
    error = models.TextField(null=True, help_text="Why it has failed, or what a task of it has met")
    created_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(db_default=Now(), help_text="When the last run began")
    ended_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "command_bus_spark_job"
        default_permissions = ("view",)
        verbose_name = "Spark job"
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(status__in=ALL), name="ck_command_bus_spark_job_status"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["-started_at"], name="ix_command_bus_spark_job_start"),
        ]

    def __str__(self) -> str:
        return self.job_id


class SparkJobDelta(models.Model):
    """What one transaction of a job has done, until the job's row is told. Writers never wait for each other there."""

    id = models.BigAutoField(primary_key=True)
    job_id = models.TextField()
    row_count = models.IntegerField(help_text="With what is written again after a failure: for the progress only")
    sent_count = models.IntegerField()

    class Meta:
        db_table = "command_bus_spark_job_delta"
        default_permissions = ()
        indexes: ClassVar = [models.Index(fields=["job_id"], name="ix_command_bus_spark_delta_job")]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.id}"


class SparkStaged(models.Model):
    """A command of an atomic job that waits for the others."""

    pk = models.CompositePrimaryKey("job_id", "command_id")
    job_id = models.TextField()
    command_id = models.UUIDField()
    command_type = models.TextField()
    data = models.JSONField()
    content_hash = models.BinaryField(max_length=32)
    size = models.IntegerField(help_text="Bytes of its data as text")
    reply_to = models.TextField(null=True)
    correlation_id = models.UUIDField(null=True)
    delay = models.FloatField(null=True)

    class Meta:
        db_table = "command_bus_spark_staged"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_id}/{self.command_id}"


class SparkReject(models.Model):
    """A row that was set aside, as it came. The same row is there once in a run, however often it was written."""

    pk = models.CompositePrimaryKey("job_id", "run", "digest")
    job_id = models.TextField()
    run = models.IntegerField(help_text="Of the job. Those of the run that completed before the last are kept, too")
    digest = models.BinaryField(max_length=32)
    command_id = models.TextField(null=True)
    command_type = models.TextField(null=True)
    data = models.TextField(null=True)
    correlation_id = models.TextField(null=True)
    reply_to = models.TextField(null=True)
    delay = models.FloatField(null=True)
    reason = models.TextField()
    rejected_at = models.DateTimeField()

    class Meta:
        db_table = "command_bus_spark_reject"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_id}: {self.reason}"
