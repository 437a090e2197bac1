-- Leases up to `qty` ready commands to a node for `vt` seconds and counts the attempt. The lease's token is
-- (msg_id, read_ct); whoever finishes, fails, extends or releases the command must show it.
--
-- Receiving starts at the queue, while everyone else locks commands first. So it never waits for a command row: a locked
-- one is skipped, keeps the token it had, and is not delivered.
CREATE OR REPLACE FUNCTION commandbus.receive(domain text, qty integer, vt integer, node_id uuid DEFAULT NULL)
RETURNS TABLE (
    command_id uuid,
    command_type text,
    correlation_id uuid,
    reply_to text,
    created_at timestamptz,
    data jsonb,
    msg_id bigint,
    read_ct integer,
    attempt integer,
    max_attempts integer,
    lease_expires_at timestamptz
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
#variable_conflict use_column
DECLARE
    _domain public.command_bus_domain;
    _queue text := receive.domain || '__commands';
    _now timestamptz;
    _msg_ids bigint[];
    _read_cts integer[];
    _messages jsonb[];
    _ids uuid[];
    _leased integer;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(receive.domain);
    IF _domain.paused THEN
        RETURN;
    END IF;

    SELECT array_agg(m.msg_id), array_agg(m.read_ct), array_agg(m.message)
    INTO _msg_ids, _read_cts, _messages
    FROM pgmq.read(_queue, receive.vt, receive.qty) AS m;
    IF _msg_ids IS NULL THEN
        RETURN;
    END IF;
    _now := clock_timestamp();
    _ids := ARRAY(
        SELECT CASE WHEN m.message ->> 'command_id' ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                    THEN (m.message ->> 'command_id')::uuid END
        FROM unnest(_messages) WITH ORDINALITY AS m(message, ordinal)
        ORDER BY m.ordinal
    );

    RETURN QUERY
    WITH free AS MATERIALIZED (
        SELECT c.id, m.read_ct, m.message
        FROM unnest(_ids, _msg_ids, _read_cts, _messages) AS m(command_id, msg_id, read_ct, message)
        JOIN public.command_bus_command c
            ON c.domain = receive.domain AND c.command_id = m.command_id AND c.msg_id = m.msg_id
           AND c.status IN ('PENDING', 'IN_PROGRESS')
        ORDER BY c.id
        FOR UPDATE OF c SKIP LOCKED
    ), leased AS (
        UPDATE public.command_bus_command c
        -- A delivery that ended without a word (its lease ran out) was no attempt.
        SET attempts = c.attempts + CASE WHEN c.lease_read_ct IS NULL THEN 1 ELSE 0 END,
            status = CASE WHEN _domain.mark_in_progress THEN 'IN_PROGRESS' ELSE c.status END,
            lease_read_ct = f.read_ct,
            lease_expires_at = _now + make_interval(secs => receive.vt),
            node_id = receive.node_id,
            updated_at = _now
        FROM free f
        WHERE c.id = f.id
        RETURNING c.*, f.message
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, event_type, ts, details_json)
        SELECT l.domain, l.command_id, 'RECEIVED', _now,
               jsonb_build_object('attempt', l.attempts, 'msg_id', l.msg_id, 'node_id', receive.node_id)
        FROM leased l
    )
    SELECT l.command_id, l.command_type, l.correlation_id, l.reply_queue, l.created_at, l.message -> 'data',
           l.msg_id, l.lease_read_ct, l.attempts, l.max_attempts, l.lease_expires_at
    FROM leased l
    ORDER BY l.msg_id;

    GET DIAGNOSTICS _leased = ROW_COUNT;
    IF _leased < cardinality(_msg_ids) THEN
        PERFORM commandbus.set_aside(receive.domain, _ids, _msg_ids);
    END IF;
END;
$function$;

-- Cares for the messages of one read that were not leased. Those without a command are archived and recorded; those
-- whose command is resolved, in the Troubleshooting Queue, or has a newer message are archived; the rest belong to
-- commands that somebody is changing at this moment, and stay.
CREATE OR REPLACE FUNCTION commandbus.set_aside(domain text, command_ids uuid[], msg_ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _queue text := set_aside.domain || '__commands';
    _unreadable bigint[];
    _stale bigint[];
BEGIN
    SELECT array_agg(m.msg_id) FILTER (WHERE c.id IS NULL),
           array_agg(m.msg_id) FILTER (WHERE c.status NOT IN ('PENDING', 'IN_PROGRESS') OR c.msg_id <> m.msg_id)
    INTO _unreadable, _stale
    FROM unnest(set_aside.command_ids, set_aside.msg_ids) AS m(command_id, msg_id)
    LEFT JOIN public.command_bus_command c ON c.domain = set_aside.domain AND c.command_id = m.command_id;

    IF _unreadable IS NOT NULL THEN
        INSERT INTO public.command_bus_unreadable_message (domain, queue_name, msg_id, reason, seen_at)
        SELECT set_aside.domain, _queue, m.msg_id,
               CASE WHEN m.command_id IS NULL THEN 'the message has no command_id that is a UUID'
                    ELSE format('there is no command %s in domain %s', m.command_id, set_aside.domain) END,
               clock_timestamp()
        FROM unnest(set_aside.command_ids, set_aside.msg_ids) AS m(command_id, msg_id)
        WHERE m.msg_id = ANY (_unreadable)
        ORDER BY m.msg_id;
    END IF;
    IF _unreadable IS NOT NULL OR _stale IS NOT NULL THEN
        PERFORM pgmq.archive(_queue, coalesce(_unreadable, '{}') || coalesce(_stale, '{}'));
    END IF;
END;
$function$;
