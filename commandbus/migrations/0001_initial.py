import uuid

import django.contrib.postgres.indexes
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

from commandbus.pgmq.install import install_pgmq


def provide_pgmq(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    install_pgmq(schema_editor.connection)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.RunPython(provide_pgmq, migrations.RunPython.noop),
        migrations.RunSQL(migrations.RunSQL.noop, reverse_sql="DROP SCHEMA IF EXISTS commandbus CASCADE"),
        migrations.CreateModel(
            name="Node",
            fields=[
                ("node_id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("name", models.TextField()),
                ("role", models.TextField()),
                ("domains", models.JSONField(default=list)),
                ("handled_types", models.JSONField(default=dict, help_text="The command types it handles, by domain")),
                ("host", models.TextField()),
                ("pid", models.IntegerField()),
                ("version", models.TextField()),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("heartbeat_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "heartbeat_seconds",
                    models.FloatField(db_default=10.0, help_text="Between two heartbeats"),
                ),
                (
                    "heard_since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="Since when no heartbeat was missed",
                    ),
                ),
                ("stop_requested_at", models.DateTimeField(help_text="When an operator asked it to stop", null=True)),
                ("stopped_at", models.DateTimeField(null=True)),
            ],
            options={
                "db_table": "command_bus_node",
                "default_permissions": ("view",),
                "permissions": [("stop_node", "Can ask nodes to stop")],
            },
        ),
        migrations.CreateModel(
            name="UnreadableMessage",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("domain", models.TextField()),
                ("queue_name", models.TextField()),
                ("msg_id", models.BigIntegerField()),
                ("reason", models.TextField()),
                ("seen_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "command_bus_unreadable_message",
                "default_permissions": ("view",),
            },
        ),
        # Partitioned by month from the first day, with a default partition so that no send ever fails for want of one.
        # The months themselves are made after migrate, by commandbus.create_audit_partitions.
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    """
                    CREATE SEQUENCE command_bus_audit_audit_id_seq;
                    CREATE TABLE command_bus_audit (
                        audit_id bigint NOT NULL DEFAULT nextval('command_bus_audit_audit_id_seq'),
                        domain text NOT NULL,
                        command_id uuid NULL,
                        batch_id uuid NULL,
                        event_type text NOT NULL,
                        ts timestamptz NOT NULL DEFAULT clock_timestamp(),
                        details_json jsonb NULL,
                        PRIMARY KEY (audit_id, ts)
                    ) PARTITION BY RANGE (ts);
                    ALTER SEQUENCE command_bus_audit_audit_id_seq OWNED BY command_bus_audit.audit_id;
                    CREATE INDEX ix_command_bus_audit_cmdid_ts ON command_bus_audit (command_id, ts);
                    CREATE INDEX ix_command_bus_audit_batch ON command_bus_audit (batch_id, ts)
                        WHERE batch_id IS NOT NULL AND command_id IS NULL;
                    CREATE INDEX ix_command_bus_audit_event ON command_bus_audit (event_type, audit_id)
                        WHERE event_type NOT IN ('SENT', 'RECEIVED', 'COMPLETED');
                    CREATE TABLE command_bus_audit_default PARTITION OF command_bus_audit DEFAULT;
                    """,
                    reverse_sql="DROP TABLE command_bus_audit",
                ),
            ],
            state_operations=[
                migrations.CreateModel(
                    name="Audit",
                    fields=[
                        ("audit_id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("domain", models.TextField()),
                        ("command_id", models.UUIDField(null=True)),
                        ("batch_id", models.UUIDField(null=True)),
                        ("event_type", models.TextField()),
                        ("ts", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                        ("details_json", models.JSONField(null=True)),
                    ],
                    options={
                        "verbose_name": "audit event",
                        "db_table": "command_bus_audit",
                        "default_permissions": ("view",),
                        "indexes": [
                            models.Index(fields=["command_id", "ts"], name="ix_command_bus_audit_cmdid_ts"),
                            models.Index(
                                condition=models.Q(("batch_id__isnull", False), ("command_id", None)),
                                fields=["batch_id", "ts"],
                                name="ix_command_bus_audit_batch",
                            ),
                            models.Index(
                                condition=models.Q(
                                    ("event_type__in", ["SENT", "RECEIVED", "COMPLETED"]), _negated=True
                                ),
                                fields=["event_type", "audit_id"],
                                name="ix_command_bus_audit_event",
                            ),
                        ],
                    },
                ),
            ],
        ),
        migrations.CreateModel(
            name="Batch",
            fields=[
                ("batch_id", models.UUIDField(primary_key=True, serialize=False)),
                ("domain", models.TextField()),
                ("name", models.TextField(null=True)),
                ("custom_data", models.JSONField(null=True)),
                (
                    "status",
                    models.TextField(
                        choices=[
                            ("PENDING", "PENDING"),
                            ("IN_PROGRESS", "IN_PROGRESS"),
                            ("COMPLETED", "COMPLETED"),
                            ("COMPLETED_WITH_FAILURES", "COMPLETED_WITH_FAILURES"),
                        ]
                    ),
                ),
                (
                    "expected_count",
                    models.IntegerField(help_text="How many commands it shall have when it is sealed", null=True),
                ),
                ("total_count", models.IntegerField(db_default=0)),
                ("completed_count", models.IntegerField(db_default=0)),
                ("failed_count", models.IntegerField(db_default=0)),
                ("canceled_count", models.IntegerField(db_default=0)),
                ("in_troubleshooting_count", models.IntegerField(db_default=0)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "updated_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="When something was last counted",
                    ),
                ),
                ("sealed_at", models.DateTimeField(help_text="Since when it takes no more commands", null=True)),
                (
                    "started_at",
                    models.DateTimeField(help_text="When the first of its commands was received", null=True),
                ),
                ("canceled_at", models.DateTimeField(null=True)),
                (
                    "completed_at",
                    models.DateTimeField(help_text="When it was sealed and all of its commands had ended", null=True),
                ),
                ("on_complete", models.JSONField(help_text="The command that is sent when it completes", null=True)),
                ("callback_sent_at", models.DateTimeField(null=True)),
                ("callback_error", models.TextField(help_text="Why that command could not be sent", null=True)),
            ],
            options={
                "verbose_name_plural": "batches",
                "db_table": "command_bus_batch",
                "default_permissions": ("view",),
                "permissions": [
                    ("cancel_batch", "Can cancel batches"),
                    ("retry_batch", "Can retry the commands of a batch that are in the Troubleshooting Queue"),
                    ("seal_batch", "Can seal open batches"),
                ],
                "indexes": [
                    models.Index(fields=["domain", "-created_at"], name="ix_command_bus_batch_created"),
                    models.Index(fields=["domain", "status", "-created_at"], name="ix_command_bus_batch_status"),
                    models.Index(
                        condition=models.Q(("completed_at__isnull", False)),
                        fields=["domain", "completed_at"],
                        name="ix_command_bus_batch_completed",
                    ),
                    models.Index(
                        condition=models.Q(("callback_error__isnull", False)),
                        fields=["domain"],
                        name="ix_command_bus_batch_callback",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status__in", ["PENDING", "IN_PROGRESS", "COMPLETED", "COMPLETED_WITH_FAILURES"])
                        ),
                        name="ck_command_bus_batch_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("completed_at", None),
                                models.Q(("status__in", ["COMPLETED", "COMPLETED_WITH_FAILURES"]), _negated=True),
                            ),
                            models.Q(
                                ("completed_at__isnull", False),
                                ("sealed_at__isnull", False),
                                ("status__in", ["COMPLETED", "COMPLETED_WITH_FAILURES"]),
                            ),
                            _connector="OR",
                        ),
                        name="ck_command_bus_batch_completed",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Command",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("domain", models.TextField()),
                ("queue_name", models.TextField()),
                ("msg_id", models.BigIntegerField(null=True)),
                ("command_id", models.UUIDField()),
                ("command_type", models.TextField()),
                (
                    "status",
                    models.TextField(
                        choices=[
                            ("PENDING", "PENDING"),
                            ("IN_PROGRESS", "IN_PROGRESS"),
                            ("COMPLETED", "COMPLETED"),
                            ("FAILED", "FAILED"),
                            ("CANCELED", "CANCELED"),
                            ("IN_TROUBLESHOOTING_QUEUE", "IN_TROUBLESHOOTING_QUEUE"),
                        ]
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0)),
                ("max_attempts", models.IntegerField()),
                ("lease_read_ct", models.IntegerField(null=True)),
                ("lease_expires_at", models.DateTimeField(null=True)),
                ("node_id", models.UUIDField(null=True)),
                ("suspect", models.BooleanField(db_default=False)),
                ("crash_count", models.SmallIntegerField(db_default=0)),
                ("vanished_count", models.SmallIntegerField(db_default=0)),
                ("last_error_type", models.TextField(null=True)),
                ("last_error_code", models.TextField(null=True)),
                ("last_error_msg", models.TextField(null=True)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("updated_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "reply_queue",
                    models.TextField(
                        help_text="None for the handling of a reply: nobody waits for an answer", null=True
                    ),
                ),
                ("correlation_id", models.UUIDField()),
                ("content_hash", models.BinaryField(max_length=32)),
                ("unique_globally", models.BooleanField(db_default=False)),
                (
                    "batch",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="commands",
                        to="commandbus.batch",
                    ),
                ),
                (
                    "answer",
                    models.JSONField(
                        help_text="What the reply says beyond this row: its data and its error", null=True
                    ),
                ),
                (
                    "rare_status",
                    models.GeneratedField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(
                                status__in=["FAILED", "CANCELED", "IN_TROUBLESHOOTING_QUEUE"], then=models.F("status")
                            ),
                            default=models.Value(None),
                        ),
                        output_field=models.TextField(null=True),
                    ),
                ),
            ],
            options={
                "db_table": "command_bus_command",
                "default_permissions": ("view",),
                "permissions": [
                    ("retry_command", "Can retry commands of the Troubleshooting Queue"),
                    ("cancel_command", "Can cancel commands"),
                    ("complete_command", "Can complete commands of the Troubleshooting Queue by hand"),
                    ("edit_command_payload", "Can change the data of commands and retry them"),
                ],
                "indexes": [
                    models.Index(
                        fields=["domain", "command_type", "id"],
                        name="ix_command_bus_command_type",
                        condition=models.Q(("domain__gte", "")),
                    ),
                    models.Index(
                        condition=models.Q(("rare_status__isnull", False)),
                        fields=["rare_status", "domain", "command_type", "id"],
                        name="ix_command_bus_command_rare",
                    ),
                    models.Index(
                        condition=models.Q(("last_error_code__isnull", False)),
                        fields=["last_error_code", "id"],
                        name="ix_command_bus_command_code",
                    ),
                    models.Index(
                        condition=models.Q(("last_error_type__isnull", False)),
                        fields=["last_error_type", "id"],
                        name="ix_command_bus_command_error",
                    ),
                    models.Index(
                        condition=models.Q(("correlation_id", models.F("command_id")), _negated=True),
                        fields=["correlation_id", "id"],
                        name="ix_command_bus_command_corr",
                    ),
                    models.Index(
                        condition=models.Q(("batch__isnull", False)),
                        fields=["batch", "id"],
                        name="ix_command_bus_command_batch",
                    ),
                    models.Index(
                        condition=models.Q(("batch__isnull", False), ("rare_status__isnull", False)),
                        fields=["batch", "rare_status", "id"],
                        name="ix_command_bus_command_btrare",
                    ),
                    django.contrib.postgres.indexes.BrinIndex(
                        autosummarize=True, fields=["created_at"], name="ix_command_bus_command_created"
                    ),
                    django.contrib.postgres.indexes.BrinIndex(
                        autosummarize=True, fields=["updated_at"], name="ix_command_bus_command_updated"
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("domain", "command_id"), name="uq_command_bus_command_domain_cmdid"
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("unique_globally", True)),
                        fields=("command_id",),
                        name="uq_command_bus_command_cmdid_global",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "status__in",
                                [
                                    "PENDING",
                                    "IN_PROGRESS",
                                    "COMPLETED",
                                    "FAILED",
                                    "CANCELED",
                                    "IN_TROUBLESHOOTING_QUEUE",
                                ],
                            )
                        ),
                        name="ck_command_bus_command_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 0),
                            ("crash_count__gte", 0),
                            ("max_attempts__gte", 1),
                            ("vanished_count__gte", 0),
                        ),
                        name="ck_command_bus_command_counts",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("lease_expires_at", None), ("lease_read_ct", None)),
                            models.Q(
                                ("lease_expires_at__isnull", False),
                                ("lease_read_ct__isnull", False),
                                ("msg_id__isnull", False),
                                ("status__in", ["PENDING", "IN_PROGRESS"]),
                            ),
                            _connector="OR",
                        ),
                        name="ck_command_bus_command_lease",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status", "IN_PROGRESS"), _negated=True),
                            ("lease_read_ct__isnull", False),
                            _connector="OR",
                        ),
                        name="ck_command_bus_command_in_progress",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("answer", None), ("status__in", ["COMPLETED", "FAILED", "CANCELED"]), _connector="OR"
                        ),
                        name="ck_command_bus_command_answer",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="TroubledCommand",
            fields=[],
            options={
                "verbose_name": "command in trouble",
                "verbose_name_plural": "troubleshooting",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("commandbus.command",),
        ),
        migrations.CreateModel(
            name="CommandType",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("domain", models.TextField()),
                ("command_type", models.TextField()),
                (
                    "max_attempts",
                    models.IntegerField(help_text="None if no handler of it was ever seen", null=True),
                ),
                (
                    "unhandled_since",
                    models.DateTimeField(help_text="When a worker first found that nobody handles it", null=True),
                ),
            ],
            options={
                "db_table": "command_bus_command_type",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=("domain", "command_type"), name="uq_command_bus_command_type"),
                    models.CheckConstraint(
                        condition=models.Q(("max_attempts__gte", 1)), name="ck_command_bus_command_type_attempts"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Domain",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("metadata", models.JSONField(db_default={})),
                ("paused", models.BooleanField(db_default=False)),
                ("queue_name", models.TextField()),
                (
                    "replies",
                    models.BooleanField(
                        db_default=False, help_text="It stands for the reply queue of its name, which has handlers"
                    ),
                ),
                ("reply_queue", models.TextField(null=True)),
                ("max_attempts", models.IntegerField()),
                ("mark_in_progress", models.BooleanField()),
                ("unique_globally", models.BooleanField()),
                ("reset_attempts", models.BooleanField()),
                ("archive_payloads", models.BooleanField()),
                ("max_payload_bytes", models.IntegerField()),
                ("crash_limit", models.IntegerField()),
                ("unknown_type_grace", models.FloatField(help_text="seconds")),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "command_bus_domain",
                "default_permissions": ("view",),
                "permissions": [("pause_domain", "Can pause and resume domains")],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("crash_limit__gte", 1),
                            ("max_attempts__gte", 1),
                            ("max_payload_bytes__gte", 1),
                            ("unknown_type_grace__gte", 0),
                        ),
                        name="ck_command_bus_domain_limits",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PayloadArchive",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("domain", models.TextField()),
                ("command_id", models.UUIDField()),
                ("payload_json", models.JSONField()),
                ("archived_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "command_bus_payload_archive",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=("domain", "command_id"), name="uq_command_bus_payload_archive")
                ],
            },
        ),
        migrations.CreateModel(
            name="Suspect",
            fields=[
                (
                    "id",
                    models.BigIntegerField(help_text="That of the command's row", primary_key=True, serialize=False),
                ),
                ("domain", models.TextField()),
                ("command_id", models.UUIDField()),
                ("msg_id", models.BigIntegerField()),
                ("since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "command_bus_suspect",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Tombstone",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "domain", "command_id", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("domain", models.TextField()),
                ("command_id", models.UUIDField()),
                ("content_hash", models.BinaryField(max_length=32)),
                ("unique_globally", models.BooleanField()),
                ("pruned_at", models.DateTimeField()),
            ],
            options={
                "db_table": "command_bus_tombstone",
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        condition=models.Q(("unique_globally", True)),
                        fields=["command_id"],
                        name="ix_command_bus_tombstone_cmdid",
                    )
                ],
            },
        ),
        # Who waits for a notification. It may be lost in a crash: polling finds the commands all the same.
        migrations.RunSQL(
            """
            CREATE UNLOGGED TABLE command_bus_idle_worker (
                domain text NOT NULL,
                node_id uuid NOT NULL,
                idle_since timestamptz NOT NULL,
                PRIMARY KEY (domain, node_id)
            )
            """,
            reverse_sql="DROP TABLE command_bus_idle_worker",
        ),
        # What was counted in batches and is not folded yet (batch_counts.sql). Its rows live for a second.
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    """
                    CREATE TABLE command_bus_batch_delta (
                        batch_id uuid NOT NULL,
                        id bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
                        total_count integer NOT NULL DEFAULT 0,
                        completed_count integer NOT NULL DEFAULT 0,
                        failed_count integer NOT NULL DEFAULT 0,
                        canceled_count integer NOT NULL DEFAULT 0,
                        in_troubleshooting_count integer NOT NULL DEFAULT 0,
                        started_at timestamptz NULL,
                        at timestamptz NOT NULL,
                        PRIMARY KEY (batch_id, id)
                    ) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
                    ALTER TABLE command_bus_batch SET (
                        fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500
                    );
                    """,
                    reverse_sql="DROP TABLE command_bus_batch_delta",
                ),
            ],
            state_operations=[
                migrations.CreateModel(
                    name="BatchDelta",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "batch_id", "id", blank=True, editable=False, primary_key=True, serialize=False
                            ),
                        ),
                        ("batch_id", models.UUIDField()),
                        ("id", models.BigIntegerField()),
                        ("total_count", models.IntegerField(db_default=0)),
                        ("completed_count", models.IntegerField(db_default=0)),
                        ("failed_count", models.IntegerField(db_default=0)),
                        ("canceled_count", models.IntegerField(db_default=0)),
                        ("in_troubleshooting_count", models.IntegerField(db_default=0)),
                        ("started_at", models.DateTimeField(null=True)),
                        ("at", models.DateTimeField()),
                    ],
                    options={"db_table": "command_bus_batch_delta", "default_permissions": ()},
                ),
            ],
        ),
        # Each command is updated twice soon after its insert, together with its neighbours on the page. If a page is not
        # half full then, all of these updates are HOT and write no index; tables and indexes even end up smaller. And
        # vacuum has to follow the growth of the history, not a fifth of it.
        migrations.RunSQL(
            """
            ALTER TABLE command_bus_command SET (
                fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02
            )
            """,
            reverse_sql=migrations.RunSQL.noop,
        ),
    ]
