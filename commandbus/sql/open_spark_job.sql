-- Begins a job that sends a DataFrame, or begins it again: the same id goes on where the last run has ended. Answers the
-- number of this run. What an earlier run still writes is refused from now on. What it has set aside stays until this run
-- has ended well: it may be what this run reads. With a `batch_id`, the commands become part of that batch, which is opened as by
-- commandbus.open_batch.
CREATE OR REPLACE FUNCTION commandbus.open_spark_job(
    job_id text,
    domain text,
    atomic boolean DEFAULT false,
    batch_id uuid DEFAULT NULL,
    batch_name text DEFAULT NULL,
    custom_data jsonb DEFAULT NULL,
    on_complete jsonb DEFAULT NULL
)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.verify_spark_job(open_spark_job.job_id, open_spark_job.domain);
    PERFORM pg_advisory_xact_lock(commandbus.spark_job_key(open_spark_job.job_id));
    SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = open_spark_job.job_id;
    IF FOUND THEN
        PERFORM commandbus.refuse_other_spark_job(_job, open_spark_job.domain, open_spark_job.batch_id, false);
        DELETE FROM public.command_bus_spark_staged s WHERE s.job_id = open_spark_job.job_id;
        PERFORM commandbus.fold_spark_job(open_spark_job.job_id);
        UPDATE public.command_bus_spark_job j
        SET status = 'RUNNING', run = j.run + 1, atomic = open_spark_job.atomic, sent_before = j.sent_count, row_count = 0,
            duplicate_count = 0, rejected_count = 0, error = NULL, started_at = clock_timestamp(), ended_at = NULL
        WHERE j.job_id = open_spark_job.job_id
        RETURNING j.* INTO _job;
    ELSE
        INSERT INTO public.command_bus_spark_job AS j (job_id, domain, status, run, atomic, batch_id, created_at, started_at)
        VALUES (open_spark_job.job_id, open_spark_job.domain, 'RUNNING', 1, open_spark_job.atomic, open_spark_job.batch_id,
                clock_timestamp(), clock_timestamp())
        RETURNING j.* INTO _job;
    END IF;
    IF open_spark_job.batch_id IS NOT NULL THEN
        PERFORM commandbus.open_batch(open_spark_job.domain, open_spark_job.batch_id, open_spark_job.batch_name,
                                      open_spark_job.custom_data, NULL, open_spark_job.on_complete);
    END IF;
    RETURN _job.run;
END;
$function$;

-- Makes a job that sends a stream known. Every task of it calls this, so it does nothing where there is nothing to do.
-- `stream_query`: whose job it is. Two queries under one id would take each other's micro-batches for their own.
CREATE OR REPLACE FUNCTION commandbus.open_spark_stream(job_id text, domain text, stream_query text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM commandbus.require_read_committed();
    SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = open_spark_stream.job_id;
    IF NOT FOUND THEN
        PERFORM commandbus.verify_spark_job(open_spark_stream.job_id, open_spark_stream.domain);
        INSERT INTO public.command_bus_spark_job (
            job_id, domain, status, run, stream_query, stream_run, created_at, started_at
        )
        VALUES (open_spark_stream.job_id, open_spark_stream.domain, 'RUNNING', 1, open_spark_stream.stream_query, '',
                clock_timestamp(), clock_timestamp())
        ON CONFLICT DO NOTHING;
        SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = open_spark_stream.job_id;
    END IF;
    PERFORM commandbus.refuse_other_spark_job(_job, open_spark_stream.domain, NULL, true);
    IF _job.stream_query <> open_spark_stream.stream_query THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('there is a job %L already: it sends another query, or the same from another checkpoint',
                             _job.job_id),
            HINT = 'Go on from its checkpoint, or choose another job id, or none: then it follows from the query';
    END IF;
END;
$function$;

-- Raises an error unless such a job can be.
CREATE OR REPLACE FUNCTION commandbus.verify_spark_job(job_id text, domain text)
RETURNS void
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _domain public.command_bus_domain := commandbus.require_domain(verify_spark_job.domain);
BEGIN
    IF _domain.replies OR coalesce(length(verify_spark_job.job_id) NOT BETWEEN 1 AND 255, true) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('there cannot be a job %L for domain %L', verify_spark_job.job_id, verify_spark_job.domain),
            HINT = 'Its id has 1 to 255 characters, and its domain is one of commands, not a reply queue';
    END IF;
END;
$function$;

-- Raises an error if a job of this id is something else than what somebody wants to go on with.
CREATE OR REPLACE FUNCTION commandbus.refuse_other_spark_job(
    job public.command_bus_spark_job, domain text, batch_id uuid, is_stream boolean
)
RETURNS void
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _differs text := CASE
        WHEN (job).domain <> refuse_other_spark_job.domain THEN format('it sends to domain %L', (job).domain)
        WHEN ((job).stream_run IS NOT NULL) <> refuse_other_spark_job.is_stream
        THEN CASE WHEN refuse_other_spark_job.is_stream THEN 'it sends a DataFrame, and not a stream'
                  ELSE 'it sends a stream, and not a DataFrame' END
        WHEN (job).batch_id IS DISTINCT FROM refuse_other_spark_job.batch_id
        THEN CASE WHEN (job).batch_id IS NULL THEN 'it has no batch' ELSE format('its batch is %s', (job).batch_id) END
    END;
BEGIN
    IF _differs IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('there is a job %L already: %s', (job).job_id, _differs),
            HINT = 'Go on with it as it was begun, or choose another job id';
    END IF;
END;
$function$;

-- Of the advisory lock of a job. Who writes a part of it takes a share, who begins or ends it all of it. It is no lock on
-- the row, because shares of that are given past those who wait for all of it.
CREATE OR REPLACE FUNCTION commandbus.spark_job_key(job_id text)
RETURNS bigint
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT hashtextextended('commandbus.spark_job ' || job_id, 0)
$function$;

-- Adds what writers have sent to the job's row. For those who hold all of the job's lock.
CREATE OR REPLACE FUNCTION commandbus.fold_spark_job(job_id text)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
    WITH folded AS (
        DELETE FROM public.command_bus_spark_job_delta d WHERE d.job_id = fold_spark_job.job_id RETURNING d.sent_count
    )
    UPDATE public.command_bus_spark_job j
    SET sent_count = j.sent_count + (SELECT coalesce(sum(f.sent_count), 0) FROM folded f)
    WHERE j.job_id = fold_spark_job.job_id
$function$;
