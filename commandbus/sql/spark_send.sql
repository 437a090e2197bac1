-- Sends some rows of a job, as one transaction. Answers those that cannot be sent, by their number from 1 on, and why. With
-- `reject` they are set aside, and the others are sent; without, nothing is written if there is one.
--
-- Rows come as text, so that one that PostgreSQL cannot read stops no other. `problems`: what the caller has found wrong
-- with them already. To call it again with the same rows does nothing, whoever has sent them, so a caller that does not
-- know what became of a call repeats it.
--
-- In a job that is `atomic`, they are kept until commandbus.close_spark_job sends them all.
CREATE OR REPLACE FUNCTION commandbus.spark_send(
    job_id text,
    run integer,
    command_ids text[],
    command_types text[],
    data text[],
    reply_to text[] DEFAULT NULL,
    correlation_ids text[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL,
    problems text[] DEFAULT NULL,
    reject boolean DEFAULT false,
    stream_run text DEFAULT NULL,
    stream_batch bigint DEFAULT NULL
)
RETURNS TABLE (ordinal bigint, problem text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM commandbus.require_read_committed();
    _job := commandbus.join_spark_job(spark_send.job_id, spark_send.run, spark_send.stream_run, spark_send.stream_batch);
    IF _job.atomic THEN
        RETURN QUERY
        SELECT s.ordinal, s.problem
        FROM commandbus.spark_stage(
            _job, spark_send.command_ids, spark_send.command_types, spark_send.data, spark_send.reply_to,
            spark_send.correlation_ids, spark_send.delays, spark_send.problems, spark_send.reject) AS s;
    ELSE
        RETURN QUERY
        SELECT d.ordinal, d.problem
        FROM commandbus.spark_dispatch(
            _job, spark_send.command_ids, spark_send.command_types, spark_send.data, spark_send.reply_to,
            spark_send.correlation_ids, spark_send.delays, spark_send.problems, spark_send.reject) AS d;
    END IF;
END;
$function$;

-- The fence: takes part in a job until the end of the transaction, or raises an error if this run of it has ended. So
-- nothing is written by an attempt of a task that Spark has given up, and that goes on all the same.
CREATE OR REPLACE FUNCTION commandbus.join_spark_job(
    job_id text, run integer, stream_run text DEFAULT NULL, stream_batch bigint DEFAULT NULL
)
RETURNS public.command_bus_spark_job
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM commandbus.commit_durably();
    PERFORM pg_advisory_xact_lock_shared(commandbus.spark_job_key(join_spark_job.job_id));
    -- In a statement of its own: it has to see what was committed while the lock was waited for.
    SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = join_spark_job.job_id;
    PERFORM commandbus.refuse_late_run(_job, join_spark_job.job_id, join_spark_job.run);
    IF _job.status <> 'RUNNING' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('job %L has ended (%s), so this attempt of a task writes nothing', _job.job_id, _job.status),
            HINT = CASE _job.status WHEN 'FAILED' THEN 'Begin it again: that completes it'
                                    ELSE 'Nothing has to be done: the attempt is late, and another one has done its work' END;
    END IF;
    IF _job.stream_run = join_spark_job.stream_run AND join_spark_job.stream_batch <= _job.stream_batch THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('micro-batch %s of job %L has ended, so this attempt of a task writes nothing',
                             join_spark_job.stream_batch, _job.job_id),
            HINT = 'Nothing has to be done: the attempt is late, and another one has done its work';
    END IF;
    RETURN _job;
END;
$function$;

-- Spark asks once for each row. So what was confirmed must not be lost, also where the database usually allows it.
CREATE OR REPLACE FUNCTION commandbus.commit_durably()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'
$function$;

-- Raises an error if a job is gone, or was begun again.
CREATE OR REPLACE FUNCTION commandbus.refuse_late_run(job public.command_bus_spark_job, job_id text, run integer)
RETURNS void
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF (job).run IS DISTINCT FROM refuse_late_run.run THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = CASE WHEN (job).run IS NULL THEN format('there is no job %L', refuse_late_run.job_id)
                           ELSE format('job %L was begun again at %s', (job).job_id, (job).started_at) END,
            HINT = 'This run of it can do nothing more; look after the other one, or begin it again';
    END IF;
END;
$function$;

-- Sends rows in a job that this transaction takes part in.
CREATE OR REPLACE FUNCTION commandbus.spark_dispatch(
    job public.command_bus_spark_job,
    command_ids text[],
    command_types text[],
    data text[],
    reply_to text[],
    correlation_ids text[],
    delays double precision[],
    problems text[],
    reject boolean
)
RETURNS TABLE (ordinal bigint, problem text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _rows integer := cardinality(spark_dispatch.command_ids);
    _refused boolean := spark_dispatch.problems IS NOT NULL;
    _is_new boolean[];
    _bad bigint[];
    _why text[];
    _sent bigint := 0;
BEGIN
    -- Most calls bring only what is right. What is wrong is looked for only if something is.
    IF NOT _refused THEN
        BEGIN
            SELECT count(*) FILTER (WHERE s.outcome = 'SENT'),
                   coalesce(bool_or(s.outcome IN ('CONFLICT', 'TOO_LARGE')), false)
            INTO _sent, _refused
            FROM commandbus.send(
                (job).domain, spark_dispatch.command_ids::uuid[], spark_dispatch.command_types,
                spark_dispatch.data::jsonb[], spark_dispatch.reply_to, spark_dispatch.correlation_ids::uuid[],
                spark_dispatch.delays, NULL, true, (job).batch_id) AS s;
        EXCEPTION
            WHEN data_exception OR program_limit_exceeded OR SQLSTATE 'CB002' OR SQLSTATE 'CB004' OR SQLSTATE 'CB007' THEN
                _refused := true;
        END;
    END IF;
    -- Between the judgement and the insert somebody else may send the same. Then it is judged again.
    FOR _attempt IN 1..20 LOOP
        EXIT WHEN NOT _refused;
        SELECT array_agg(j.is_new ORDER BY j.ordinal), array_agg(j.ordinal) FILTER (WHERE j.problem IS NOT NULL),
               array_agg(j.problem) FILTER (WHERE j.problem IS NOT NULL)
        INTO _is_new, _bad, _why
        FROM commandbus.spark_judge(
            (job).domain, spark_dispatch.command_ids, spark_dispatch.command_types, spark_dispatch.data,
            spark_dispatch.reply_to, spark_dispatch.correlation_ids, spark_dispatch.delays, spark_dispatch.problems) AS j;
        IF _bad IS NOT NULL AND NOT spark_dispatch.reject THEN
            RETURN QUERY SELECT b.ordinal, b.problem FROM unnest(_bad, _why) AS b(ordinal, problem);
            RETURN;
        END IF;
        BEGIN
            SELECT n.sent, n.refused INTO _sent, _refused
            FROM commandbus.spark_send_new(
                job, spark_dispatch.command_ids, spark_dispatch.command_types, spark_dispatch.data, spark_dispatch.reply_to,
                spark_dispatch.correlation_ids, spark_dispatch.delays, _is_new, true) AS n;
        EXCEPTION
            WHEN SQLSTATE 'CB007' THEN
                _refused := true;
        END;
    END LOOP;
    IF _refused THEN
        RAISE EXCEPTION USING
            ERRCODE = 'serialization_failure',
            MESSAGE = format('others send the commands of job %L at the same time, again and again', (job).job_id);
    END IF;
    PERFORM commandbus.spark_set_aside(
        job, spark_dispatch.command_ids, spark_dispatch.command_types, spark_dispatch.data,
        spark_dispatch.reply_to, spark_dispatch.correlation_ids, spark_dispatch.delays, _bad, _why);
    INSERT INTO public.command_bus_spark_job_delta (job_id, row_count, sent_count) VALUES ((job).job_id, _rows, _sent);
    RETURN QUERY SELECT b.ordinal, b.problem FROM unnest(_bad, _why) AS b(ordinal, problem);
END;
$function$;

-- Sends the rows that are new. Answers how many, or that it was refused: somebody has sent one of them meanwhile, with
-- other content, and nothing was written. (In a batch, whatever somebody has sent meanwhile is an error CB007.)
CREATE OR REPLACE FUNCTION commandbus.spark_send_new(
    job public.command_bus_spark_job,
    command_ids text[],
    command_types text[],
    data text[],
    reply_to text[],
    correlation_ids text[],
    delays double precision[],
    is_new boolean[],
    wake boolean,
    OUT sent bigint,
    OUT refused boolean
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    SELECT count(*) FILTER (WHERE s.outcome = 'SENT'), coalesce(bool_or(s.outcome IN ('CONFLICT', 'TOO_LARGE')), false)
    INTO sent, refused
    FROM (
        SELECT array_agg(i.command_id::uuid) AS ids, array_agg(i.command_type) AS types, array_agg(i.data::jsonb) AS data,
               array_agg(i.reply_to) AS reply_to, array_agg(i.correlation_id::uuid) AS correlation_ids,
               array_agg(i.delay) AS delays
        FROM unnest(spark_send_new.command_ids, spark_send_new.command_types, spark_send_new.data, spark_send_new.reply_to,
                    spark_send_new.correlation_ids, spark_send_new.delays, spark_send_new.is_new)
            AS i(command_id, command_type, data, reply_to, correlation_id, delay, is_new)
        WHERE i.is_new
    ) AS n
    CROSS JOIN LATERAL commandbus.send(
        (job).domain, n.ids, n.types, n.data, n.reply_to, n.correlation_ids, n.delays, NULL, spark_send_new.wake,
        (job).batch_id) AS s
    WHERE n.ids IS NOT NULL;
END;
$function$;

-- Keeps rows of an atomic job until it is closed.
CREATE OR REPLACE FUNCTION commandbus.spark_stage(
    job public.command_bus_spark_job,
    command_ids text[],
    command_types text[],
    data text[],
    reply_to text[],
    correlation_ids text[],
    delays double precision[],
    problems text[],
    reject boolean
)
RETURNS TABLE (ordinal bigint, problem text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
DECLARE
    _is_new boolean[];
    _bad bigint[];
    _why text[];
BEGIN
    SELECT array_agg(j.is_new ORDER BY j.ordinal), array_agg(j.ordinal) FILTER (WHERE j.problem IS NOT NULL),
           array_agg(j.problem) FILTER (WHERE j.problem IS NOT NULL)
    INTO _is_new, _bad, _why
    FROM commandbus.spark_judge(
        (job).domain, spark_stage.command_ids, spark_stage.command_types, spark_stage.data, spark_stage.reply_to,
        spark_stage.correlation_ids, spark_stage.delays, spark_stage.problems) AS j;
    IF _bad IS NOT NULL AND NOT spark_stage.reject THEN
        RETURN QUERY SELECT b.ordinal, b.problem FROM unnest(_bad, _why) AS b(ordinal, problem);
        RETURN;
    END IF;
    BEGIN
        INSERT INTO public.command_bus_spark_staged (
            job_id, command_id, command_type, data, content_hash, size, reply_to, correlation_id, delay
        )
        SELECT (job).job_id, i.command_id::uuid, i.command_type, i.data::jsonb,
               commandbus.content_hash(i.command_type, i.data::jsonb), octet_length(i.data), i.reply_to,
               i.correlation_id::uuid, i.delay
        FROM unnest(spark_stage.command_ids, spark_stage.command_types, spark_stage.data, spark_stage.reply_to,
                    spark_stage.correlation_ids, spark_stage.delays, _is_new)
            AS i(command_id, command_type, data, reply_to, correlation_id, delay, is_new)
        WHERE i.is_new
        ORDER BY i.command_id::uuid  -- so that two who stage the same do not deadlock
        ON CONFLICT DO NOTHING;
        SELECT _bad || array_agg(i.ordinal),
               _why || array_agg('another row has its command_id, with another type or other data; is what the id follows from unique?'::text)
        INTO _bad, _why
        FROM unnest(spark_stage.command_ids, spark_stage.command_types, spark_stage.data, _is_new)
            WITH ORDINALITY AS i(command_id, command_type, data, is_new, ordinal)
        CROSS JOIN LATERAL (
            SELECT s.content_hash FROM public.command_bus_spark_staged s
            WHERE s.job_id = (job).job_id AND s.command_id = i.command_id::uuid
            LIMIT 1
        ) AS s
        WHERE i.is_new AND s.content_hash <> commandbus.content_hash(i.command_type, i.data::jsonb);
        IF _bad IS NOT NULL AND NOT spark_stage.reject THEN
            RAISE EXCEPTION USING ERRCODE = 'CB002', MESSAGE = 'what was inserted is taken back';
        END IF;
        PERFORM commandbus.spark_set_aside(
            job, spark_stage.command_ids, spark_stage.command_types, spark_stage.data,
            spark_stage.reply_to, spark_stage.correlation_ids, spark_stage.delays, _bad, _why);
        INSERT INTO public.command_bus_spark_job_delta (job_id, row_count, sent_count)
        VALUES ((job).job_id, cardinality(spark_stage.command_ids), 0);
    EXCEPTION
        WHEN SQLSTATE 'CB002' THEN
            NULL;  -- the problems are answered below
    END;
    RETURN QUERY SELECT b.ordinal, b.problem FROM unnest(_bad, _why) AS b(ordinal, problem);
END;
$function$;

-- What each row is: new, or why it cannot be sent, or else a duplicate. Of rows with the same id, the first counts.
CREATE OR REPLACE FUNCTION commandbus.spark_judge(
    domain text,
    command_ids text[],
    command_types text[],
    data text[],
    reply_to text[],
    correlation_ids text[],
    delays double precision[],
    problems text[]
)
RETURNS TABLE (ordinal bigint, is_new boolean, problem text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- As commandbus.send: no plan may begin at a table.
SET enable_seqscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    _domain public.command_bus_domain := commandbus.require_domain(spark_judge.domain);
    _queues text[] := CASE WHEN spark_judge.reply_to IS NOT NULL THEN ARRAY(
        SELECT q.queue_name FROM pgmq.list_queues() AS q WHERE q.queue_name !~ '__(commands|events|events_dlq)$') END;
BEGIN
    RETURN QUERY
    WITH given AS MATERIALIZED (
        SELECT i.ordinal, i.command_id, i.command_type, i.data,
               coalesce(i.problem, commandbus.spark_row_problem(
                   i.command_id, i.command_type, i.data, i.correlation_id, i.reply_to, i.delay, _queues,
                   _domain.max_payload_bytes)) AS problem
        FROM unnest(spark_judge.command_ids, spark_judge.command_types, spark_judge.data, spark_judge.reply_to,
                    spark_judge.correlation_ids, spark_judge.delays, spark_judge.problems)
            WITH ORDINALITY AS i(command_id, command_type, data, reply_to, correlation_id, delay, problem, ordinal)
    ), readable AS MATERIALIZED (
        -- One pass over all rows, also over those that cannot be read: a join of what was set apart would take the square
        -- of their number.
        SELECT g.ordinal, g.problem, CASE WHEN g.problem IS NULL THEN g.command_id::uuid END AS command_id,
               CASE WHEN g.problem IS NULL THEN commandbus.content_hash(g.command_type, g.data::jsonb) END AS hash
        FROM given g
    ), compared AS (
        SELECT r.ordinal, r.problem, r.hash, coalesce(k.content_hash, t.content_hash) AS known_hash,
               o.domain AS elsewhere,
               first_value(r.hash) OVER same_id AS first_hash, row_number() OVER same_id AS occurrence
        FROM readable r
        LEFT JOIN LATERAL (
            SELECT k.content_hash FROM public.command_bus_command k
            WHERE k.domain = spark_judge.domain AND k.command_id BETWEEN r.command_id AND r.command_id
            ORDER BY k.command_id
            LIMIT 1
        ) AS k ON true
        LEFT JOIN LATERAL (
            SELECT t.content_hash FROM public.command_bus_tombstone t
            WHERE t.domain = spark_judge.domain AND t.command_id = r.command_id
            LIMIT 1
        ) AS t ON true
        LEFT JOIN LATERAL (
            SELECT commandbus.spark_other_domain(_domain, r.command_id) AS domain WHERE _domain.unique_globally
        ) AS o ON true
        WINDOW same_id AS (PARTITION BY r.command_id ORDER BY r.ordinal)
    )
    SELECT c.ordinal,
           c.problem IS NULL AND c.known_hash IS NULL AND c.elsewhere IS NULL AND c.occurrence = 1,
           CASE
               WHEN c.problem IS NOT NULL THEN c.problem
               WHEN c.known_hash <> c.hash
               THEN 'it was sent before with another type or other data; send a changed command under a new id'
               WHEN c.known_hash IS NULL AND c.elsewhere IS NOT NULL
               THEN format('its command_id was sent to domain %s before', c.elsewhere)
               WHEN c.known_hash IS NULL AND c.first_hash <> c.hash
               THEN 'another row has its command_id, with another type or other data; is what the id follows from unique?'
           END
    FROM compared c;
END;
$function$;

-- The other domain that has a command of this id, where ids are unique in the whole database.
CREATE OR REPLACE FUNCTION commandbus.spark_other_domain(domain public.command_bus_domain, command_id uuid)
RETURNS text
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
    SELECT coalesce(
        (SELECT c.domain FROM public.command_bus_command c
         WHERE c.unique_globally AND c.command_id = spark_other_domain.command_id AND c.domain <> (spark_other_domain.domain).name LIMIT 1),
        (SELECT t.domain FROM public.command_bus_tombstone t
         WHERE t.unique_globally AND t.command_id = spark_other_domain.command_id AND t.domain <> (spark_other_domain.domain).name LIMIT 1))
$function$;

-- Why a row cannot be a command, if so. The values themselves are not repeated, but ids: they may be secrets.
CREATE OR REPLACE FUNCTION commandbus.spark_row_problem(
    command_id text, command_type text, data text, correlation_id text, reply_to text, delay double precision,
    queues text[], max_payload_bytes integer
)
RETURNS text
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _data jsonb;
    _id text;
    _detail text;
BEGIN
    IF command_type IS NULL THEN
        RETURN 'it has no command_type';
    ELSIF length(command_type) NOT BETWEEN 1 AND 255 THEN
        RETURN format('its command_type has %s characters; 1 to 255 are allowed', length(command_type));
    ELSIF command_id IS NULL THEN
        RETURN 'it has no command_id';
    ELSIF data IS NULL THEN
        RETURN 'it has no data; use {} if there are none';
    ELSIF NOT coalesce(delay, 0) BETWEEN 0 AND 3155760000 THEN
        RETURN format('its delay is %s; 0 seconds to 100 years are allowed', delay);
    ELSIF reply_to <> ALL (queues) THEN
        RETURN format('there is no reply queue %L', left(reply_to, 100));
    END IF;
    FOREACH _id IN ARRAY ARRAY[command_id, correlation_id] LOOP
        BEGIN
            PERFORM _id::uuid;
        EXCEPTION WHEN data_exception THEN
            RETURN format('%L is not a UUID', left(_id, 100));
        END;
    END LOOP;
    BEGIN
        _data := data::jsonb;
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL;
        -- Other details repeat what was not understood.
        RETURN format('its data cannot be read as JSON: %s%s', SQLERRM,
                      CASE WHEN _detail ~ '^(Unicode (high|low) surrogate|\\u0000)' THEN ': ' || _detail ELSE '' END);
    END;
    IF jsonb_typeof(_data) <> 'object' THEN
        RETURN format('its data must be a JSON object, not %s', jsonb_typeof(_data));
    ELSIF octet_length(_data::text) > max_payload_bytes THEN
        RETURN format('its data take %s bytes; the domain allows %s', octet_length(_data::text), max_payload_bytes);
    END IF;
    RETURN NULL;
END;
$function$;

-- Of a command, as it is first sent: as in commandbus.send.
CREATE OR REPLACE FUNCTION commandbus.content_hash(command_type text, data jsonb)
RETURNS bytea
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT sha256(convert_to(command_type || E'\n' || data::text, 'UTF8'))
$function$;

-- Keeps the rows numbered `ordinals` as they came.
CREATE OR REPLACE FUNCTION commandbus.spark_set_aside(
    job public.command_bus_spark_job, command_ids text[], command_types text[], data text[], reply_to text[],
    correlation_ids text[], delays double precision[], ordinals bigint[], reasons text[]
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = on  -- some who call this do without
AS $function$
    INSERT INTO public.command_bus_spark_reject (
        job_id, run, digest, command_id, command_type, data, correlation_id, reply_to, delay, reason, rejected_at
    )
    SELECT (job).job_id, (job).run,
           sha256(convert_to(to_jsonb(ARRAY[i.command_id, i.command_type, i.data, i.correlation_id, i.reply_to,
                                            i.delay::text])::text, 'UTF8')) AS digest,
           i.command_id, i.command_type, i.data, i.correlation_id, i.reply_to, i.delay, b.reason, clock_timestamp()
    FROM unnest(spark_set_aside.command_ids, spark_set_aside.command_types, spark_set_aside.data, spark_set_aside.reply_to,
                spark_set_aside.correlation_ids, spark_set_aside.delays)
        WITH ORDINALITY AS i(command_id, command_type, data, reply_to, correlation_id, delay, ordinal)
    JOIN unnest(spark_set_aside.ordinals, spark_set_aside.reasons) AS b(ordinal, reason) ON b.ordinal = i.ordinal
    ORDER BY digest  -- so that two who set the same aside do not deadlock
    ON CONFLICT DO NOTHING
$function$;
