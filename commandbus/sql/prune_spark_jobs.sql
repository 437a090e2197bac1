-- Removes up to `qty` jobs of a domain that ended before `before`, or were begun before and never ended, with what they
-- have set aside or kept; a thousand at the most, for each takes a lock. Answers how many. The commands stay what they are:
-- to send the same DataFrame again sends nothing twice. A stream has no end: its job goes if it has committed nothing since
-- then (and is made again if it goes on), and what it has set aside goes when it is as old.
CREATE OR REPLACE FUNCTION commandbus.prune_spark_jobs(domain text, before timestamptz, qty integer)
RETURNS integer
LANGUAGE plpgsql
STRICT
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _jobs text[];
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.require_domain(prune_spark_jobs.domain);
    _jobs := ARRAY(
        SELECT o.job_id
        FROM (
            SELECT j.job_id
            FROM public.command_bus_spark_job j
            WHERE j.domain = prune_spark_jobs.domain
              AND coalesce(j.ended_at, j.committed_at, j.started_at) < prune_spark_jobs.before
            ORDER BY j.started_at
            LIMIT 1000
        ) AS o
        WHERE pg_try_advisory_xact_lock(commandbus.spark_job_key(o.job_id))
        LIMIT prune_spark_jobs.qty
    );
    WITH pruned AS (
        DELETE FROM public.command_bus_spark_job j
        WHERE j.job_id = ANY (_jobs)
          AND coalesce(j.ended_at, j.committed_at, j.started_at) < prune_spark_jobs.before  -- it may have been begun again meanwhile
        RETURNING j.job_id
    )
    SELECT coalesce(array_agg(p.job_id), '{}') INTO _jobs FROM pruned p;
    DELETE FROM public.command_bus_spark_reject r WHERE r.job_id = ANY (_jobs);
    DELETE FROM public.command_bus_spark_reject r
    WHERE r.job_id = ANY (ARRAY(
        SELECT j.job_id FROM public.command_bus_spark_job j
        WHERE j.domain = prune_spark_jobs.domain AND j.stream_run IS NOT NULL
    )) AND r.rejected_at < prune_spark_jobs.before;
    DELETE FROM public.command_bus_spark_staged s WHERE s.job_id = ANY (_jobs);
    DELETE FROM public.command_bus_spark_job_delta d WHERE d.job_id = ANY (_jobs);
    RETURN cardinality(_jobs);
END;
$function$;
