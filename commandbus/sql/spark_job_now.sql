-- A job as it is at this moment: its row, what writers have sent since it was last folded, and how many rows they have
-- met (`handled_rows`: with those that were written again after a failure). Null if there is none.
CREATE OR REPLACE FUNCTION commandbus.spark_job_now(job_id text)
RETURNS jsonb
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
    SELECT to_jsonb(j) || jsonb_build_object('sent_count', j.sent_count + d.sent, 'handled_rows', d.rows)
    FROM public.command_bus_spark_job j
    CROSS JOIN (
        SELECT coalesce(sum(d.sent_count), 0) AS sent, coalesce(sum(d.row_count), 0) AS rows
        FROM public.command_bus_spark_job_delta d
        WHERE d.job_id = spark_job_now.job_id
    ) AS d
    WHERE j.job_id = spark_job_now.job_id
$function$;
