-- Cancels commands that wait: status, audit, message archived, reply CANCELED. Answers per command whether it was done,
-- and if not, why. One refusal does not stop the others. `operator`: who did it, if it was a person. With `msg_ids`, only
-- what still has the message that it had when it was chosen.
CREATE OR REPLACE FUNCTION commandbus.cancel(
    domain text,
    command_ids uuid[],
    reason text DEFAULT NULL,
    operator text DEFAULT NULL,
    msg_ids bigint[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
#variable_conflict use_column
DECLARE
    _now timestamptz;
    _rows bigint[];
    _ids bigint[];
    _msg_ids bigint[];
    _queues text[];
    _replies jsonb[];
    _refused jsonb;
    _batches uuid[];
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.require_domain(cancel.domain);
    _rows := commandbus.rows_of(cancel.domain, cancel.command_ids);

    -- Only what can be canceled is locked: a refused call must not hold up the worker that runs the command.
    WITH waiting AS MATERIALIZED (
        SELECT c.id
        FROM public.command_bus_command c
        WHERE c.id = ANY (_rows)
          AND c.status = 'PENDING' AND c.lease_read_ct IS NULL
          AND (cancel.msg_ids IS NULL OR c.msg_id = ANY (cancel.msg_ids))
        ORDER BY c.id
        FOR UPDATE
    )
    SELECT array_agg(w.id) INTO _ids FROM waiting w;
    _now := clock_timestamp();  -- of the act, not of the beginning of a wait for it
    SELECT jsonb_object_agg(
               c.command_id,
               CASE WHEN c.id = ANY (_ids) THEN NULL
                    WHEN c.lease_read_ct IS NOT NULL
                    THEN format('a worker has leased it until %s; it can be canceled when it waits again', c.lease_expires_at)
                    WHEN c.status = 'PENDING' THEN 'it was retried since it was chosen'
                    ELSE format('its status is %s', c.status) END
           )
    INTO _refused
    FROM public.command_bus_command c
    WHERE c.id = ANY (_rows);

    WITH canceled AS (
        UPDATE public.command_bus_command c
        SET status = 'CANCELED',
            answer = commandbus.answer_of(
                NULL,
                jsonb_build_object('code', 'CANCELED', 'message', coalesce(cancel.reason, 'canceled before it was started'),
                                   'type', 'CommandCanceled')),
            updated_at = _now
        WHERE c.id = ANY (_ids)
        RETURNING c.command_id, c.batch_id, c.msg_id, c.reply_queue, commandbus.reply_of(c) AS reply
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT cancel.domain, c.command_id, c.batch_id, 'CANCELED', _now,
               jsonb_build_object('reason', cancel.reason)
                   || CASE WHEN cancel.operator IS NULL THEN '{}' ELSE jsonb_build_object('operator', cancel.operator) END
        FROM canceled c
    )
    SELECT array_agg(c.msg_id), array_agg(c.reply_queue), array_agg(c.reply),
           array_agg(c.batch_id) FILTER (WHERE c.batch_id IS NOT NULL)
    INTO _msg_ids, _queues, _replies, _batches
    FROM canceled c;
    IF _msg_ids IS NOT NULL THEN
        PERFORM pgmq.archive(commandbus.queue_of(cancel.domain), _msg_ids);
        PERFORM commandbus.send_replies(_queues, _replies);
    END IF;
    IF _batches IS NOT NULL THEN
        PERFORM commandbus.count_in_batches(_batches, array_fill('CANCELED'::text, ARRAY[cardinality(_batches)]), _now);
    END IF;

    RETURN QUERY SELECT a.* FROM commandbus.answer(cancel.domain, cancel.command_ids, _refused) AS a;
END;
$function$;
