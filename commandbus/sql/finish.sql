-- Ends leased commands as COMPLETED, FAILED or CANCELED: status, audit, message, and one reply each.
-- Answers the ids it ended. A command whose token is no longer valid is left alone and not in the answer.
--
-- `row_ids`, if they are known from `receive`, save looking them up.
CREATE OR REPLACE FUNCTION commandbus.finish(
    domain text,
    command_ids uuid[],
    msg_ids bigint[],
    read_cts integer[],
    statuses text[],
    results jsonb[] DEFAULT NULL,
    errors jsonb[] DEFAULT NULL,
    row_ids bigint[] DEFAULT NULL
)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    _rows bigint[];
    _queue text := commandbus.queue_of(finish.domain);
    _now timestamptz := clock_timestamp();
    _ids uuid[];
    _delete bigint[];
    _archive bigint[];
    _queues text[];
    _replies jsonb[];
    _batches uuid[];
    _batch_statuses text[];
BEGIN
    PERFORM commandbus.require_read_committed();
    IF NOT finish.statuses <@ ARRAY['COMPLETED', 'FAILED', 'CANCELED'] THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('a command cannot be ended as one of %s', finish.statuses),
            HINT = 'End it as COMPLETED, FAILED or CANCELED; to try it again, call commandbus.fail or commandbus.release';
    END IF;
    _rows := coalesce(finish.row_ids, commandbus.rows_of(finish.domain, finish.command_ids));

    WITH finished AS (
        UPDATE public.command_bus_command c
        SET status = w.status,
            lease_read_ct = NULL,
            lease_expires_at = NULL,
            last_error_type = coalesce(w.error ->> 'type', c.last_error_type),
            last_error_code = coalesce(w.error ->> 'code', c.last_error_code),
            last_error_msg = coalesce(w.error ->> 'message', c.last_error_msg),
            answer = commandbus.answer_of(w.result, w.error),
            updated_at = _now
        FROM (
            SELECT u.id, u.command_id, u.msg_id, u.read_ct, u.status, u.result, commandbus.cut_error(u.error) AS error
            FROM unnest(_rows, finish.command_ids, finish.msg_ids, finish.read_cts, finish.statuses, finish.results,
                        finish.errors) AS u(id, command_id, msg_id, read_ct, status, result, error)
            ORDER BY u.id  -- everyone locks commands in this order
        ) AS w
        WHERE c.id = ANY (ARRAY[w.id])
          AND (c.domain, c.command_id) IS NOT DISTINCT FROM (finish.domain, w.command_id)  -- as in rows_of
          AND c.msg_id = w.msg_id AND c.lease_read_ct = w.read_ct
        RETURNING c.command_id, c.batch_id, c.msg_id, c.status, c.attempts, c.node_id, c.reply_queue,
                  commandbus.reply_of(c) AS reply, w.error
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT finish.domain, f.command_id, f.batch_id, f.status, _now,
               jsonb_build_object('attempt', f.attempts, 'node_id', f.node_id)
                   || CASE WHEN f.error IS NULL THEN '{}' ELSE jsonb_build_object('error', f.error) END
        FROM finished f
    )
    SELECT array_agg(f.command_id),
           array_agg(f.msg_id) FILTER (WHERE f.status = 'COMPLETED'),
           array_agg(f.msg_id) FILTER (WHERE f.status <> 'COMPLETED'),
           array_agg(f.reply_queue), array_agg(f.reply),
           array_agg(f.batch_id) FILTER (WHERE f.batch_id IS NOT NULL),
           array_agg(f.status) FILTER (WHERE f.batch_id IS NOT NULL)
    INTO _ids, _delete, _archive, _queues, _replies, _batches, _batch_statuses
    FROM finished f;

    IF _ids IS NULL THEN
        RETURN;
    END IF;
    IF _delete IS NOT NULL THEN
        PERFORM pgmq.delete(_queue, _delete);
    END IF;
    IF _archive IS NOT NULL THEN
        PERFORM pgmq.archive(_queue, _archive);
    END IF;
    PERFORM commandbus.send_replies(_queues, _replies);
    IF _batches IS NOT NULL THEN
        PERFORM commandbus.count_in_batches(_batches, _batch_statuses, _now);
    END IF;
    RETURN QUERY SELECT unnest(_ids);
END;
$function$;
