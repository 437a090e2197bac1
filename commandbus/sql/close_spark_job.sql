-- Ends a run of a job that has written all its rows: sends what an atomic job has kept, seals the batch, counts. Waits for
-- those who are just writing; what comes later is refused. Answers the job as commandbus.spark_job_now does. To call it
-- again does nothing. `row_count`: of the whole DataFrame, each row once; `rejected_count`: how many of these were set
-- aside. (The same row is kept once, however often it is there.) With `reject`, what an atomic job cannot send is set aside,
-- too; without, it is an error, and nothing was done.
--
-- Each call of commandbus.spark_send has left a count of its rows, in the transaction that has sent them. If there are fewer
-- than `row_count`, some are lost: a standby that was behind has taken over, for example. (Enough of them prove nothing:
-- rows that were written twice count twice.)
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
        PERFORM commandbus.require_spark_rows(_job.job_id, close_spark_job.row_count);
        IF _job.atomic THEN
            _rejected := _rejected + commandbus.spark_release(_job, close_spark_job.reject);
        END IF;
        PERFORM commandbus.fold_spark_job(_job.job_id);
        UPDATE public.command_bus_spark_job j
        SET status = 'COMPLETED', completed_run = j.run, row_count = close_spark_job.row_count,
            rejected_count = _rejected, error = NULL,
            duplicate_count = greatest(0, close_spark_job.row_count - j.sent_count - _rejected), ended_at = clock_timestamp()
        WHERE j.job_id = close_spark_job.job_id;
        -- What the run that completed last has set aside is kept: this one may have been given a part of it only.
        DELETE FROM public.command_bus_spark_reject r
        WHERE r.job_id = close_spark_job.job_id AND r.run < _job.completed_run;
        IF _job.batch_id IS NOT NULL THEN
            PERFORM commandbus.seal_batch(_job.domain, _job.batch_id);
        END IF;
        IF _job.atomic THEN
            PERFORM commandbus.wake(_job.domain);
        END IF;
    END IF;
    RETURN commandbus.spark_job_now(close_spark_job.job_id);
END;
$function$;

-- Raises an error if PostgreSQL has fewer rows of a job than its tasks have written since it was last folded.
CREATE OR REPLACE FUNCTION commandbus.require_spark_rows(job_id text, row_count bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _found bigint;
BEGIN
    SELECT coalesce(sum(d.row_count), 0) INTO _found
    FROM public.command_bus_spark_job_delta d
    WHERE d.job_id = require_spark_rows.job_id;
    IF _found < require_spark_rows.row_count THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB008',
            MESSAGE = format('%s rows were written for job %L, and PostgreSQL has only %s of them',
                             require_spark_rows.row_count, require_spark_rows.job_id, _found),
            HINT = 'Begin the job, or start the query, again: that sends what is missing. Did a standby take over that was '
                   'behind, or does somebody else write the same?';
    END IF;
END;
$function$;

-- Sends what an atomic job has kept. Answers how many commands were set aside instead.
--
-- It has no block with an exception handler: each of many would be a subtransaction, and more than 64 of them in one
-- transaction slow everybody down. And it wakes nobody, for nobody could wake the same worker until it has ended.
CREATE OR REPLACE FUNCTION commandbus.spark_release(job public.command_bus_spark_job, reject boolean)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    _chunk record;
    _is_new boolean[];
    _bad bigint[];
    _why text[];
    _sent bigint;
    _refused boolean;
    _rejected integer := 0;
    _last uuid := '00000000-0000-0000-0000-000000000000';
BEGIN
    LOOP
        SELECT array_agg(s.command_id::text ORDER BY s.command_id) AS ids,
               array_agg(s.command_type ORDER BY s.command_id) AS types,
               array_agg(s.data::text ORDER BY s.command_id) AS data,
               array_agg(s.reply_to ORDER BY s.command_id) AS reply_to,
               array_agg(s.correlation_id::text ORDER BY s.command_id) AS correlation_ids,
               array_agg(s.delay ORDER BY s.command_id) AS delays
        INTO _chunk
        FROM (
            SELECT n.*, sum(n.size) OVER (ORDER BY n.command_id) - n.size AS before
            FROM (
                SELECT s.* FROM public.command_bus_spark_staged s
                WHERE s.job_id = (job).job_id AND s.command_id >= _last
                ORDER BY s.job_id, s.command_id
                LIMIT 1000
            ) AS n
        ) AS s
        WHERE s.before < 4194304;  -- large ones, fewer at a time: all of a chunk is in memory, more than once
        EXIT WHEN _chunk.ids IS NULL;
        -- Between the judgement and the insert somebody else may send the same. Then it is judged again.
        FOR _attempt IN 1..20 LOOP
            SELECT array_agg(j.is_new ORDER BY j.ordinal), array_agg(j.ordinal) FILTER (WHERE j.problem IS NOT NULL),
                   array_agg(j.problem) FILTER (WHERE j.problem IS NOT NULL)
            INTO _is_new, _bad, _why
            FROM commandbus.spark_judge((job).domain, _chunk.ids, _chunk.types, _chunk.data, _chunk.reply_to,
                                        _chunk.correlation_ids, _chunk.delays, NULL) AS j;
            IF _bad IS NOT NULL AND NOT spark_release.reject THEN
                RAISE EXCEPTION USING
                    ERRCODE = 'CB002',
                    MESSAGE = format('command %s of type %L cannot be sent: %s', _chunk.ids[_bad[1]],
                                     _chunk.types[_bad[1]], _why[1]),
                    HINT = 'Nothing was sent; correct it and begin the job again, or let it be set aside';
            END IF;
            SELECT n.sent, n.refused INTO _sent, _refused
            FROM commandbus.spark_send_new(job, _chunk.ids, _chunk.types, _chunk.data, _chunk.reply_to,
                                           _chunk.correlation_ids, _chunk.delays, _is_new, false) AS n;
            EXIT WHEN NOT _refused;
        END LOOP;
        IF _refused THEN
            RAISE EXCEPTION USING
                ERRCODE = 'serialization_failure',
                MESSAGE = format('others send the commands of job %L at the same time, again and again', (job).job_id);
        END IF;
        PERFORM commandbus.spark_set_aside(job, _chunk.ids, _chunk.types, _chunk.data, _chunk.reply_to,
                                           _chunk.correlation_ids, _chunk.delays, _bad, _why);
        INSERT INTO public.command_bus_spark_job_delta (job_id, row_count, sent_count) VALUES ((job).job_id, 0, _sent);
        _rejected := _rejected + coalesce(cardinality(_bad), 0);
        -- A chunk has all that is kept between its ends, for nobody else writes in this job meanwhile.
        DELETE FROM public.command_bus_spark_staged s
        WHERE s.job_id = (job).job_id
          AND s.command_id BETWEEN _chunk.ids[1]::uuid AND _chunk.ids[cardinality(_chunk.ids)]::uuid;
        _last := _chunk.ids[cardinality(_chunk.ids)];
    END LOOP;
    RETURN _rejected;
END;
$function$;

-- Ends a run of a job that cannot go on. What it has sent stays sent, and its batch stays open: to begin it again completes
-- both. `error`: why; if that is not known, what a task has said. Answers whether it was running.
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
    SET status = 'FAILED', ended_at = clock_timestamp(),
        error = coalesce(left(fail_spark_job.error, 10000), j.error, 'Spark has given up: its own log says why')
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
    PERFORM commandbus.require_spark_rows(_job.job_id, close_spark_stream_batch.row_count);
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
    PERFORM commandbus.commit_durably();
    PERFORM pg_advisory_xact_lock(commandbus.spark_job_key(lock_spark_job.job_id));
    SELECT j.* INTO _job FROM public.command_bus_spark_job j WHERE j.job_id = lock_spark_job.job_id;
    PERFORM commandbus.refuse_late_run(_job, lock_spark_job.job_id, lock_spark_job.run);
    RETURN _job;
END;
$function$;
