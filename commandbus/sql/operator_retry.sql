-- Sends commands from the Troubleshooting Queue again: the payload as a new message, status PENDING. Answers per command
-- whether it was done, and if not, why. One refusal does not stop the others. With `msg_ids`, only what still has the
-- message that it had when it was chosen (lock_troubled).
CREATE OR REPLACE FUNCTION commandbus.operator_retry(
    domain text,
    command_ids uuid[],
    operator text DEFAULT NULL,
    reason text DEFAULT NULL,
    msg_ids bigint[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT * FROM commandbus.requeue(
        operator_retry.domain, operator_retry.command_ids, NULL, operator_retry.operator, operator_retry.reason,
        operator_retry.msg_ids)
$function$;

-- The same, with other data for each command. The command keeps its id. What its data were before stays in the audit,
-- and a duplicate is still one of the content that was sent first.
CREATE OR REPLACE FUNCTION commandbus.operator_edit(
    domain text,
    command_ids uuid[],
    data jsonb[],
    operator text DEFAULT NULL,
    reason text DEFAULT NULL,
    msg_ids bigint[] DEFAULT NULL
)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF cardinality(operator_edit.data) IS DISTINCT FROM cardinality(operator_edit.command_ids)
       OR cardinality(operator_edit.command_ids) > (SELECT count(DISTINCT i) FROM unnest(operator_edit.command_ids) AS i)
       OR EXISTS (SELECT FROM unnest(operator_edit.data) AS d WHERE jsonb_typeof(d) IS DISTINCT FROM 'object') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('the data for %s commands of domain %L cannot be used',
                             coalesce(cardinality(operator_edit.command_ids), 0), operator_edit.domain),
            HINT = 'Name each command once, with one JSON object at the same place';
    END IF;
    RETURN QUERY SELECT r.* FROM commandbus.requeue(
        operator_edit.domain, operator_edit.command_ids, operator_edit.data, operator_edit.operator,
        operator_edit.reason, operator_edit.msg_ids) AS r;
END;
$function$;

-- `data`: NULL to send each command as it is.
CREATE OR REPLACE FUNCTION commandbus.requeue(
    domain text, command_ids uuid[], data jsonb[], operator text, reason text, msg_ids bigint[]
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
    _domain public.command_bus_domain;
    _now timestamptz;
    _troubled bigint[];
    _rows bigint[];
    _ids bigint[];
    _before jsonb[];
    _messages jsonb[];
    _msg_ids bigint[];
    _refused jsonb;
    _batches uuid[];
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(requeue.domain);

    _troubled := commandbus.lock_troubled(requeue.domain, requeue.command_ids, requeue.msg_ids);
    _now := clock_timestamp();  -- of the act, not of the beginning of a wait for it
    _rows := commandbus.rows_of(requeue.domain, requeue.command_ids);
    WITH wanted AS (
        SELECT DISTINCT ON (m.id)
               m.id, c.command_id, m.message -> 'data' AS before,
               CASE WHEN requeue.data IS NULL THEN m.message ELSE commandbus.command_envelope(c, m.data) END AS message,
               CASE
                   WHEN (c.id = ANY (_troubled)) IS NOT TRUE THEN commandbus.why_not(c.status)
                   WHEN requeue.data IS NOT NULL AND _domain.replies THEN 'it is a reply, which nobody may change'
                   WHEN requeue.data IS NULL AND m.message IS NULL THEN 'its payload is no longer in the archive'
                   WHEN octet_length(m.data::text) > _domain.max_payload_bytes
                   THEN format('its new data take more than the %s bytes that the domain allows', _domain.max_payload_bytes)
               END AS why
        FROM unnest(_rows, commandbus.messages_of(requeue.domain, _rows), requeue.data) AS m(id, message, data)
        JOIN public.command_bus_command c ON c.id = ANY (ARRAY[m.id])
        ORDER BY m.id
    )
    SELECT array_agg(w.id) FILTER (WHERE w.why IS NULL),
           array_agg(w.before) FILTER (WHERE w.why IS NULL),
           array_agg(w.message) FILTER (WHERE w.why IS NULL),
           jsonb_object_agg(w.command_id, w.why)
    INTO _ids, _before, _messages, _refused
    FROM wanted w;

    IF _ids IS NOT NULL THEN
        SELECT array_agg(s.msg_id) INTO _msg_ids FROM pgmq.send_batch(_domain.queue_name, _messages, _now) AS s(msg_id);
        IF requeue.data IS NOT NULL THEN
            INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
            SELECT requeue.domain, c.command_id, c.batch_id, 'OPERATOR_EDIT', _now,
                   jsonb_build_object('operator', requeue.operator, 'reason', requeue.reason,
                                      'data_before', n.before, 'data', n.message -> 'data')
            FROM unnest(_ids, _before, _messages) AS n(id, before, message)
            JOIN public.command_bus_command c ON c.id = ANY (ARRAY[n.id]);
            WITH archived AS MATERIALIZED (
                SELECT p.id, n.message -> 'data' AS data
                FROM unnest(_messages) AS n(message)
                CROSS JOIN LATERAL (
                    SELECT p.id FROM public.command_bus_payload_archive p
                    WHERE p.domain = requeue.domain AND p.command_id = (n.message ->> 'command_id')::uuid
                    LIMIT 1
                ) AS p
            )
            UPDATE public.command_bus_payload_archive p
            SET payload_json = a.data
            FROM archived a
            WHERE p.id = ANY (ARRAY[a.id]);
        END IF;
        WITH retried AS (
            UPDATE public.command_bus_command c
            SET status = 'PENDING',
                msg_id = n.msg_id,
                attempts = CASE WHEN _domain.reset_attempts THEN 0 ELSE c.attempts END,
                -- An attempt must be left, or the retry would end where it began.
                max_attempts = CASE WHEN _domain.reset_attempts THEN c.max_attempts
                                    ELSE greatest(c.max_attempts, c.attempts + 1) END,
                -- (What has killed its process stays a suspect, and starts again where it can kill no other.)
                crash_count = 0,
                vanished_count = 0,
                updated_at = _now
            FROM unnest(_ids, _msg_ids) AS n(id, msg_id)
            WHERE c.id = ANY (ARRAY[n.id])
            RETURNING c.command_id, c.batch_id, c.msg_id
        ), audited AS (
            INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
            SELECT requeue.domain, r.command_id, r.batch_id, 'OPERATOR_RETRY', _now,
                   jsonb_build_object('operator', requeue.operator, 'reason', requeue.reason, 'msg_id', r.msg_id)
            FROM retried r
        )
        SELECT array_agg(r.batch_id) INTO _batches FROM retried r WHERE r.batch_id IS NOT NULL;
        IF _batches IS NOT NULL THEN
            PERFORM commandbus.count_in_batches(_batches, NULL, _now, true);
        END IF;
    END IF;
    RETURN QUERY SELECT a.* FROM commandbus.answer(requeue.domain, requeue.command_ids, _refused) AS a;
END;
$function$;
