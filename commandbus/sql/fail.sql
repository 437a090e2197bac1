-- Records that leased commands failed. With a delay and an attempt left, the same message becomes visible again after
-- the delay (in seconds). Without, the command goes to the Troubleshooting Queue: no reply until an operator decides.
-- The command's stored max_attempts decides whether an attempt is left. Answers the new status per command; a command
-- whose token is no longer valid is left alone and not in the answer.
CREATE OR REPLACE FUNCTION commandbus.fail(
    domain text,
    command_ids uuid[],
    msg_ids bigint[],
    read_cts integer[],
    errors jsonb[],
    delays double precision[] DEFAULT NULL,
    reasons text[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, status text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
#variable_conflict use_column
DECLARE
    _rows bigint[];
    _queue text := commandbus.queue_of(fail.domain);
    _now timestamptz := clock_timestamp();
    _ids uuid[];
    _statuses text[];
    _msg_ids bigint[];
    _delays double precision[];
    _archive bigint[];
    _delay double precision;
    _batches uuid[];
    _batch_statuses text[];
BEGIN
    PERFORM commandbus.require_read_committed();
    _rows := commandbus.rows_of(fail.domain, fail.command_ids);

    WITH held AS MATERIALIZED (
        SELECT c.id, commandbus.cut_error(w.error) AS error, w.delay, w.reason
        FROM unnest(_rows, fail.msg_ids, fail.read_cts, fail.errors, fail.delays, fail.reasons)
            AS w(id, msg_id, read_ct, error, delay, reason)
        JOIN public.command_bus_command c ON c.id = ANY (ARRAY[w.id]) AND c.msg_id = w.msg_id AND c.lease_read_ct = w.read_ct
        ORDER BY w.id
        FOR UPDATE OF c
    ), failed AS (
        UPDATE public.command_bus_command c
        SET status = CASE WHEN h.delay IS NOT NULL AND c.attempts < c.max_attempts
                          THEN 'PENDING' ELSE 'IN_TROUBLESHOOTING_QUEUE' END,
            lease_read_ct = NULL,
            lease_expires_at = NULL,
            suspect = c.crash_count + c.vanished_count > 0,  -- it had its say, and killed nobody
            last_error_type = h.error ->> 'type',
            last_error_code = h.error ->> 'code',
            last_error_msg = h.error ->> 'message',
            updated_at = _now
        FROM held h
        WHERE c.id = ANY (ARRAY[h.id])
        RETURNING c.command_id, c.batch_id, c.msg_id, c.status, c.attempts, c.max_attempts, c.node_id,
                  h.error, h.delay, h.reason
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT fail.domain, f.command_id, f.batch_id,
               CASE f.status WHEN 'PENDING' THEN 'RETRY_SCHEDULED' ELSE 'MOVED_TO_TROUBLESHOOTING_QUEUE' END,
               _now,
               jsonb_build_object(
                   'attempt', f.attempts, 'max_attempts', f.max_attempts, 'node_id', f.node_id, 'error', f.error
               ) || CASE
                   WHEN f.status = 'PENDING' THEN jsonb_build_object('delay', f.delay)
                   WHEN f.delay IS NOT NULL THEN jsonb_build_object('reason', 'EXHAUSTED')
                   ELSE jsonb_build_object('reason', coalesce(f.reason, 'PERMANENT'))
               END
        FROM failed f
    )
    SELECT array_agg(f.command_id), array_agg(f.status),
           array_agg(f.msg_id) FILTER (WHERE f.status = 'PENDING'),
           array_agg(f.delay) FILTER (WHERE f.status = 'PENDING'),
           array_agg(f.msg_id) FILTER (WHERE f.status <> 'PENDING'),
           array_agg(f.batch_id) FILTER (WHERE f.status <> 'PENDING' AND f.batch_id IS NOT NULL),
           array_agg(f.status) FILTER (WHERE f.status <> 'PENDING' AND f.batch_id IS NOT NULL)
    INTO _ids, _statuses, _msg_ids, _delays, _archive, _batches, _batch_statuses
    FROM failed f;

    FOR _delay IN SELECT DISTINCT d FROM unnest(_delays) AS d LOOP
        PERFORM pgmq.set_vt(
            _queue,
            ARRAY(SELECT n.msg_id FROM unnest(_msg_ids, _delays) AS n(msg_id, delay) WHERE n.delay = _delay),
            _now + make_interval(secs => _delay)
        );
    END LOOP;
    IF _archive IS NOT NULL THEN
        PERFORM pgmq.archive(_queue, _archive);
    END IF;
    IF _batches IS NOT NULL THEN
        PERFORM commandbus.count_in_batches(_batches, _batch_statuses, _now);
    END IF;
    RETURN QUERY SELECT n.* FROM unnest(_ids, _statuses) AS n(command_id, status);
END;
$function$;
