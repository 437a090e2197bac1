import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("commandbus", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="SparkReject",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "job_id", "run", "digest", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("job_id", models.TextField()),
                (
                    "run",
                    models.IntegerField(
                        help_text="Of the job. Those of the run that completed before the last are kept, too"
                    ),
                ),
                ("digest", models.BinaryField(max_length=32)),
                ("command_id", models.TextField(null=True)),
                ("command_type", models.TextField(null=True)),
                ("data", models.TextField(null=True)),
                ("correlation_id", models.TextField(null=True)),
                ("reply_to", models.TextField(null=True)),
                ("delay", models.FloatField(null=True)),
                ("reason", models.TextField()),
                ("rejected_at", models.DateTimeField()),
            ],
            options={
                "db_table": "command_bus_spark_reject",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="SparkStaged",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "job_id", "command_id", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("job_id", models.TextField()),
                ("command_id", models.UUIDField()),
                ("command_type", models.TextField()),
                ("data", models.JSONField()),
                ("content_hash", models.BinaryField(max_length=32)),
                ("size", models.IntegerField(help_text="Bytes of its data as text")),
                ("reply_to", models.TextField(null=True)),
                ("correlation_id", models.UUIDField(null=True)),
                ("delay", models.FloatField(null=True)),
            ],
            options={
                "db_table": "command_bus_spark_staged",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="SparkJob",
            fields=[
                ("job_id", models.TextField(primary_key=True, serialize=False)),
                ("domain", models.TextField()),
                (
                    "status",
                    models.TextField(
                        choices=[("RUNNING", "RUNNING"), ("COMPLETED", "COMPLETED"), ("FAILED", "FAILED")]
                    ),
                ),
                (
                    "run",
                    models.IntegerField(
                        help_text="How often it was begun. What an earlier run still writes is refused"
                    ),
                ),
                (
                    "atomic",
                    models.BooleanField(
                        db_default=False, help_text="Whether the transaction that ends it sends it all"
                    ),
                ),
                ("batch_id", models.UUIDField(null=True)),
                ("completed_run", models.IntegerField(help_text="The last run that has completed", null=True)),
                ("stream_query", models.TextField(help_text="The streaming query that it sends", null=True)),
                (
                    "stream_run",
                    models.TextField(help_text="The run of the streaming query that has committed last", null=True),
                ),
                (
                    "stream_batch",
                    models.BigIntegerField(help_text="The micro-batch that it has committed last", null=True),
                ),
                ("committed_at", models.DateTimeField(help_text="When that was", null=True)),
                (
                    "row_count",
                    models.BigIntegerField(db_default=0, help_text="Rows of the DataFrame, or of the stream so far"),
                ),
                ("sent_count", models.BigIntegerField(db_default=0)),
                (
                    "sent_before",
                    models.BigIntegerField(db_default=0, help_text="How many of these were sent by earlier runs"),
                ),
                (
                    "duplicate_count",
                    models.BigIntegerField(
                        db_default=0, help_text="Rows whose command was sent before, or stands there twice"
                    ),
                ),
                ("rejected_count", models.BigIntegerField(db_default=0, help_text="Rows that were set aside")),
                ("error", models.TextField(help_text="Why it has failed, or what a task of it has met", null=True)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), help_text="When the last run began"
                    ),
                ),
                ("ended_at", models.DateTimeField(null=True)),
            ],
            options={
                "verbose_name": "Spark job",
                "db_table": "command_bus_spark_job",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["-started_at"], name="ix_command_bus_spark_job_start"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("status__in", ["RUNNING", "COMPLETED", "FAILED"])),
                        name="ck_command_bus_spark_job_status",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SparkJobDelta",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("job_id", models.TextField()),
                (
                    "row_count",
                    models.IntegerField(help_text="With what is written again after a failure: for the progress only"),
                ),
                ("sent_count", models.IntegerField()),
            ],
            options={
                "db_table": "command_bus_spark_job_delta",
                "default_permissions": (),
                "indexes": [models.Index(fields=["job_id"], name="ix_command_bus_spark_delta_job")],
            },
        ),
    ]
