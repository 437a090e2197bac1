-- Sends commands from the Troubleshooting Queue again: the archived payload as a new message, status PENDING.
-- Answers per command whether it was done, and if not, why. One refusal does not stop the others.
CREATE OR REPLACE FUNCTION commandbus.operator_retry(
    domain text, command_ids uuid[], operator text DEFAULT NULL, reason text DEFAULT NULL
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
    _queue text := operator_retry.domain || '__commands';
    _now timestamptz := clock_timestamp();
    _ids bigint[];
    _messages jsonb[];
    _msg_ids bigint[];
    _refused jsonb;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(operator_retry.domain);

    _ids := commandbus.lock_troubled(operator_retry.domain, operator_retry.command_ids);

    -- PGMQ has no function that reads its archive.
    EXECUTE format(
        $query$
            WITH readable AS (
                SELECT f.id, f.command_id, f.status, f.id = ANY ($2) AS troubled,
                       coalesce(a.message, CASE WHEN p.payload_json IS NOT NULL THEN jsonb_build_object(
                           'command_id', f.command_id, 'type', f.command_type, 'domain', f.domain,
                           'correlation_id', f.correlation_id, 'reply_to', f.reply_queue, 'created_at', f.created_at,
                           'data', p.payload_json) END) AS message
                FROM public.command_bus_command f
                LEFT JOIN pgmq.%I a ON a.msg_id = f.msg_id
                LEFT JOIN public.command_bus_payload_archive p ON p.domain = f.domain AND p.command_id = f.command_id
                WHERE f.id = ANY ($1)
                ORDER BY f.id
            )
            SELECT array_agg(r.id) FILTER (WHERE r.troubled AND r.message IS NOT NULL),
                   array_agg(r.message) FILTER (WHERE r.troubled AND r.message IS NOT NULL),
                   jsonb_object_agg(r.command_id, CASE
                       WHEN r.troubled IS NOT TRUE THEN format('its status is %%s', r.status)
                       WHEN r.message IS NULL THEN 'its payload is no longer in the archive' END)
            FROM readable r
        $query$, 'a_' || _queue)
    INTO _ids, _messages, _refused
    USING commandbus.rows_of(operator_retry.domain, operator_retry.command_ids), _ids;

    IF _ids IS NOT NULL THEN
        SELECT array_agg(s.msg_id) INTO _msg_ids FROM pgmq.send_batch(_queue, _messages, _now) AS s(msg_id);
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
            WHERE c.id = n.id
            RETURNING c.command_id, c.msg_id
        )
        INSERT INTO public.command_bus_audit (domain, command_id, event_type, ts, details_json)
        SELECT operator_retry.domain, r.command_id, 'OPERATOR_RETRY', _now,
               jsonb_build_object(
                   'operator', operator_retry.operator, 'reason', operator_retry.reason, 'msg_id', r.msg_id)
        FROM retried r;
    END IF;
    RETURN QUERY SELECT a.* FROM commandbus.answer(operator_retry.domain, operator_retry.command_ids, _refused) AS a;
END;
$function$;
