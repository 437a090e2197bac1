-- Resolves commands of the Troubleshooting Queue without running them, and sends the reply that was held back. A cancel
-- needs a reason, because that is what the sender gets to read.
CREATE OR REPLACE FUNCTION commandbus.operator_cancel(
    domain text, command_ids uuid[], reason text, operator text DEFAULT NULL, msg_ids bigint[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(btrim(operator_cancel.reason), '') = '' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = 'an operator''s cancel needs a reason',
            HINT = 'Say why in a few words: the sender gets them with the reply';
    END IF;
    RETURN QUERY SELECT r.* FROM commandbus.operator_resolve(
        operator_cancel.domain, operator_cancel.command_ids, 'CANCELED', 'OPERATOR_CANCEL',
        operator_cancel.operator, operator_cancel.reason, NULL, operator_cancel.msg_ids) AS r;
END;
$function$;

CREATE OR REPLACE FUNCTION commandbus.operator_complete(
    domain text,
    command_ids uuid[],
    result jsonb DEFAULT NULL,
    operator text DEFAULT NULL,
    reason text DEFAULT NULL,
    msg_ids bigint[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT * FROM commandbus.operator_resolve(
        operator_complete.domain, operator_complete.command_ids, 'COMPLETED', 'OPERATOR_COMPLETE',
        operator_complete.operator, operator_complete.reason, operator_complete.result, operator_complete.msg_ids)
$function$;

CREATE OR REPLACE FUNCTION commandbus.operator_resolve(
    domain text,
    command_ids uuid[],
    status text,
    event_type text,
    operator text,
    reason text,
    result jsonb,
    msg_ids bigint[]
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
#variable_conflict use_column
DECLARE
    _now timestamptz;
    _ids bigint[];
    _refused jsonb;
    _queues text[];
    _replies jsonb[];
    _batches uuid[];
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.require_domain(operator_resolve.domain);

    _ids := commandbus.lock_troubled(
        operator_resolve.domain, operator_resolve.command_ids, operator_resolve.msg_ids);
    _now := clock_timestamp();  -- of the act, not of the beginning of a wait for it
    SELECT jsonb_object_agg(c.command_id, CASE WHEN (c.id = ANY (_ids)) IS NOT TRUE
                                               THEN commandbus.why_not(c.status) END)
    INTO _refused
    FROM public.command_bus_command c
    WHERE c.id = ANY (commandbus.rows_of(operator_resolve.domain, operator_resolve.command_ids));

    WITH resolved AS (
        UPDATE public.command_bus_command c
        SET status = operator_resolve.status,
            answer = commandbus.answer_of(
                operator_resolve.result,
                CASE WHEN operator_resolve.status <> 'COMPLETED' THEN jsonb_build_object(
                    'code', 'OPERATOR_CANCEL', 'message', operator_resolve.reason, 'type', 'CommandCanceled') END),
            updated_at = _now
        FROM unnest(_ids) AS n(id)
        WHERE c.id = ANY (ARRAY[n.id])
        RETURNING c.command_id, c.batch_id, c.reply_queue, commandbus.reply_of(c) AS reply
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT operator_resolve.domain, r.command_id, r.batch_id, operator_resolve.event_type, _now,
               jsonb_build_object('operator', operator_resolve.operator, 'reason', operator_resolve.reason)
                   || CASE WHEN operator_resolve.result IS NULL THEN '{}'
                           ELSE jsonb_build_object('result', operator_resolve.result) END
        FROM resolved r
    )
    SELECT array_agg(r.reply_queue), array_agg(r.reply), array_agg(r.batch_id) FILTER (WHERE r.batch_id IS NOT NULL)
    INTO _queues, _replies, _batches
    FROM resolved r;
    IF _queues IS NOT NULL THEN
        PERFORM commandbus.send_replies(_queues, _replies);
    END IF;
    IF _batches IS NOT NULL THEN
        PERFORM commandbus.count_in_batches(
            _batches, array_fill(operator_resolve.status, ARRAY[cardinality(_batches)]), _now, true);
    END IF;
    RETURN QUERY SELECT a.* FROM commandbus.answer(operator_resolve.domain, operator_resolve.command_ids, _refused) AS a;
END;
$function$;
