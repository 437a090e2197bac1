-- The messages of commands, in the order of their rows: from the queue while they wait, from PGMQ's archive while they
-- are in the Troubleshooting Queue, else from the payload archive. Null where none has it: PGMQ deletes what is done.
-- (PGMQ has no function that reads its archive, or the queue without hiding what it reads.)
CREATE OR REPLACE FUNCTION commandbus.messages_of(domain text, rows bigint[])
RETURNS jsonb[]
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _queue text := commandbus.queue_of(messages_of.domain);
    _messages jsonb[];
BEGIN
    -- Each is a question of its own, which cannot become a walk along a whole table that was small when it was analyzed.
    EXECUTE format(
        $query$
            SELECT array_agg(
                coalesce(
                    (SELECT q.message FROM pgmq.%I q WHERE q.msg_id = c.msg_id LIMIT 1),
                    (SELECT a.message FROM pgmq.%I a WHERE a.msg_id = c.msg_id LIMIT 1),
                    (SELECT commandbus.command_envelope(c.command, p.payload_json)
                     FROM public.command_bus_payload_archive p
                     WHERE p.domain = c.domain AND p.command_id = c.command_id))
                ORDER BY w.ordinal)
            FROM unnest($1) WITH ORDINALITY AS w(id, ordinal)
            LEFT JOIN LATERAL (
                SELECT c AS command, c.domain, c.command_id, c.msg_id FROM public.command_bus_command c
                WHERE c.id = w.id
                LIMIT 1
            ) AS c ON true
        $query$, 'q_' || _queue, 'a_' || _queue)
    INTO _messages
    USING messages_of.rows;
    RETURN _messages;
END;
$function$;

-- The message that says what a command asks for. No SET clause, so that PostgreSQL can inline it.
CREATE OR REPLACE FUNCTION commandbus.command_envelope(command public.command_bus_command, data jsonb)
RETURNS jsonb
LANGUAGE sql
STABLE
AS $function$
    SELECT pg_catalog.jsonb_build_object(
        'command_id', (command).command_id,
        'type', (command).command_type,
        'domain', (command).domain,
        'correlation_id', (command).correlation_id,
        'reply_to', (command).reply_queue,
        'created_at', (command).created_at,
        'data', data
    )
$function$;

-- The data that commands were sent with, or last edited to, and replies as a whole; null where they are gone.
CREATE OR REPLACE FUNCTION commandbus.payloads(domain text, command_ids uuid[])
RETURNS TABLE (command_id uuid, data jsonb)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _domain public.command_bus_domain := commandbus.require_domain(payloads.domain);
    _rows bigint[];
BEGIN
    _rows := commandbus.rows_of(payloads.domain, payloads.command_ids);
    RETURN QUERY
    SELECT m.command_id, CASE WHEN _domain.replies THEN m.message ELSE m.message -> 'data' END
    FROM unnest(_rows, payloads.command_ids, commandbus.messages_of(payloads.domain, _rows)) AS m(id, command_id, message)
    WHERE m.id IS NOT NULL;
END;
$function$;
