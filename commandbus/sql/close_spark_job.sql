-- Ends a run of a job that has written all its rows: sends what an atomic job has kept, seals the batch, counts. Waits for
-- those who are just writing; what comes later is refused. Answers the job as commandbus.spark_job_now does. To call it
-- again does nothing. `row_count`: of the whole DataFrame, each row once; `rejected_count`: how many of these were set
-- aside. (The same row is kept once, however often it is there.) With `reject`, what an atomic job cannot send is set aside,
-- too; without, it is an error, and nothing was done.
CREATE OR REPLACE FUNCTION commandbus.close_spark_job(
    job_id text, run integer, row_count bigint, rejected_count bigint DEFAULT 0, reject boolean DEFAULT false
)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
    _rejected bigint := close_spark_job.rejected_count;
BEGIN
    PERFORM commandbus.require_read_committed();
    _job := commandbus.lock_spark_job(close_spark_job.job_id, close_spark_job.run);
    IF _job.status = 'FAILED' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('job %L has failed: %s', _job.job_id, _job.error),
            HINT = 'Begin it again';
    END IF;
    IF _job.status = 'RUNNING' THEN
        IF _job.atomic THEN
            _rejected := _rejected + commandbus.spark_release(_job, close_spark_job.reject);
        END IF;
        PERFORM commandbus.fold_spark_job(_job.job_id);
        UPDATE public.command_bus_spark_job j
        SET status = 'COMPLETED', row_count = close_spark_job.row_count, rejected_count = _rejected, error = NULL,
            duplicate_count = greatest(0, close_spark_job.row_count - j.sent_count - _rejected), ended_at = clock_timestamp()
        WHERE j.job_id = close_spark_job.job_id;
        IF _job.batch_id IS NOT NULL THEN
            PERFORM commandbus.seal_batch(_job.domain, _job.batch_id);
        END IF;
    END IF;
    RETURN commandbus.spark_job_now(close_spark_job.job_id);
END;
$function$;

-- Sends what an atomic job has kept. Answers how many commands were set aside instead.
CREATE OR REPLACE FUNCTION commandbus.spark_release(job public.command_bus_spark_job, reject boolean)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _chunk record;
    _bad bigint[];
    _why text[];
    _rejected integer := 0;
    _last uuid := '00000000-0000-0000-0000-000000000000';
BEGIN
    LOOP
        SELECT array_agg(s.command_id::text) AS ids, array_agg(s.command_type) AS types, array_agg(s.data::text) AS data,
               array_agg(s.reply_to) AS reply_to, array_agg(s.correlation_id::text) AS correlation_ids,
               array_agg(s.delay) AS delays
        INTO _chunk
        FROM (
            SELECT s.* FROM public.command_bus_spark_staged s
            WHERE s.job_id = (job).job_id AND s.command_id >= _last
            ORDER BY s.job_id, s.command_id
            LIMIT 1000
        ) AS s;
        EXIT WHEN _chunk.ids IS NULL;
        SELECT array_agg(d.ordinal), array_agg(d.problem) INTO _bad, _why
        FROM commandbus.spark_dispatch(job, _chunk.ids, _chunk.types, _chunk.data, _chunk.reply_to, _chunk.correlation_ids,
                                       _chunk.delays, NULL, spark_release.reject) AS d;
        IF _bad IS NOT NULL AND NOT spark_release.reject THEN
            RAISE EXCEPTION USING
                ERRCODE = 'CB002',
                MESSAGE = format('command %s of type %L cannot be sent: %s', _chunk.ids[_bad[1]], _chunk.types[_bad[1]],
                                 _why[1]),
                HINT = 'Nothing was sent; correct it and begin the job again, or let it be set aside';
        END IF;
        _rejected := _rejected + coalesce(cardinality(_bad), 0);
        DELETE FROM public.command_bus_spark_staged s
        WHERE s.job_id = (job).job_id AND s.command_id = ANY (_chunk.ids::uuid[]);
        _last := _chunk.ids[cardinality(_chunk.ids)];
    END LOOP;
    RETURN _rejected;
END;
$function$;

-- Ends a run of a job that cannot go on. What it has sent stays sent, and its batch stays open: to begin it again completes
-- both. `error`: why, unless a task has said so. Answers whether it was running.
CREATE OR REPLACE FUNCTION commandbus.fail_spark_job(job_id text, run integer, error text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM commandbus.require_read_committed();
    _job := commandbus.lock_spark_job(fail_spark_job.job_id, fail_spark_job.run);
    IF _job.status <> 'RUNNING' THEN
        RETURN false;
    END IF;
    DELETE FROM public.command_bus_spark_staged s WHERE s.job_id = fail_spark_job.job_id;
    PERFORM commandbus.fold_spark_job(fail_spark_job.job_id);
    UPDATE public.command_bus_spark_job j
    SET status = 'FAILED', error = coalesce(j.error, left(fail_spark_job.error, 10000)), ended_at = clock_timestamp()
    WHERE j.job_id = fail_spark_job.job_id;
    RETURN true;
END;
$function$;

-- Keeps what a task has met that cannot go on. Spark may try it again, so the job is still running. The first word counts.
CREATE OR REPLACE FUNCTION commandbus.note_spark_error(job_id text, run integer, error text)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
    UPDATE public.command_bus_spark_job j SET error = left(note_spark_error.error, 10000)
    WHERE j.job_id = note_spark_error.job_id AND j.run = note_spark_error.run AND j.status = 'RUNNING' AND j.error IS NULL
$function$;

-- Ends a micro-batch of a stream. Attempts of its tasks that come later are refused, unless the query was started again
-- (`stream_run`): then Spark may send the micro-batch that it was at once more, which is not counted again. To call it
-- again does nothing.
CREATE OR REPLACE FUNCTION commandbus.close_spark_stream_batch(
    job_id text, stream_run text, stream_batch bigint, row_count bigint, rejected_count bigint DEFAULT 0
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
    _counts boolean;
BEGIN
    PERFORM commandbus.require_read_committed();
    _job := commandbus.lock_spark_job(close_spark_stream_batch.job_id, 1);
    IF _job.stream_run = close_spark_stream_batch.stream_run
       AND close_spark_stream_batch.stream_batch <= _job.stream_batch THEN
        RETURN;
    END IF;
    _counts := _job.stream_batch IS DISTINCT FROM close_spark_stream_batch.stream_batch;
    PERFORM commandbus.fold_spark_job(close_spark_stream_batch.job_id);
    UPDATE public.command_bus_spark_job j
    SET stream_run = close_spark_stream_batch.stream_run, stream_batch = close_spark_stream_batch.stream_batch,
        committed_at = clock_timestamp(), error = NULL,
        row_count = j.row_count + CASE WHEN _counts THEN close_spark_stream_batch.row_count ELSE 0 END,
        rejected_count = j.rejected_count + CASE WHEN _counts THEN close_spark_stream_batch.rejected_count ELSE 0 END
    WHERE j.job_id = close_spark_stream_batch.job_id;
    UPDATE public.command_bus_spark_job j
    SET duplicate_count = greatest(0, j.row_count - j.sent_count - j.rejected_count)
    WHERE j.job_id = close_spark_stream_batch.job_id;
END;
$function$;

-- The row of a job, with all of its lock, until the end of the transaction.
CREATE OR REPLACE FUNCTION commandbus.lock_spark_job(job_id text, run integer)
RETURNS public.command_bus_spark_job
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _job public.command_bus_spark_job;
BEGIN
    PERFORM pg_advisory_xact_lock(commandbus.spark_job_key(lock_spark_job.job_id));
    SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = lock_spark_job.job_id;
    PERFORM commandbus.refuse_late_run(_job, lock_spark_job.job_id, lock_spark_job.run);
    RETURN _job;
END;
$function$;
