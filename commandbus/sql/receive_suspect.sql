-- Leases one suspect to an isolated process, as `receive` leases others. The commit of this call is the record that its
-- run has started: if the process dies after it, that is the command's doing (accuse).
CREATE OR REPLACE FUNCTION commandbus.receive_suspect(domain text, vt integer, node_id uuid)
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
    lease_expires_at timestamptz,
    row_id bigint,
    batch_id uuid
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
    _now timestamptz := clock_timestamp();
    _until timestamptz := _now + make_interval(secs => receive_suspect.vt);
    _id bigint;
    _msg_id bigint;
    _read_ct integer;
    _message jsonb;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(receive_suspect.domain);
    IF _domain.paused THEN
        RETURN;
    END IF;

    SELECT c.id, c.msg_id INTO _id, _msg_id
    FROM public.command_bus_suspect s
    JOIN public.command_bus_command c
        ON c.id = ANY (ARRAY[s.id]) AND c.msg_id = s.msg_id AND c.status = 'PENDING' AND c.lease_read_ct IS NULL
    WHERE s.domain = receive_suspect.domain
    ORDER BY s.since, s.id
    LIMIT 1
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- What is left may have been canceled meanwhile.
        DELETE FROM public.command_bus_suspect s
        WHERE s.id = ANY (ARRAY(
            SELECT o.id
            FROM public.command_bus_suspect o
            LEFT JOIN public.command_bus_command c ON c.id = ANY (ARRAY[o.id]) AND c.msg_id = o.msg_id AND c.status = 'PENDING'
            WHERE o.domain = receive_suspect.domain AND c.id IS NULL
            FOR UPDATE OF o SKIP LOCKED
        ));
        RETURN;
    END IF;

    EXECUTE format(
        'UPDATE pgmq.%I q SET vt = $1, read_ct = q.read_ct + 1 WHERE q.msg_id = $2 RETURNING q.read_ct, q.message',
        'q_' || _domain.queue_name)
    INTO _read_ct, _message
    USING _until, _msg_id;
    DELETE FROM public.command_bus_suspect s WHERE s.id = _id;
    IF _read_ct IS NULL THEN
        RETURN;
    END IF;

    RETURN QUERY
    WITH leased AS (
        UPDATE public.command_bus_command c
        SET attempts = c.attempts + 1,
            status = CASE WHEN _domain.mark_in_progress THEN 'IN_PROGRESS' ELSE c.status END,
            lease_read_ct = _read_ct,
            lease_expires_at = _until,
            node_id = receive_suspect.node_id,
            updated_at = _now
        WHERE c.id = _id
        RETURNING c.*
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT l.domain, l.command_id, l.batch_id, 'RECEIVED', _now,
               jsonb_build_object(
                   'attempt', l.attempts, 'msg_id', l.msg_id, 'node_id', receive_suspect.node_id, 'isolated', true)
        FROM leased l
    )
    SELECT l.command_id, l.command_type, l.correlation_id, l.reply_queue, l.created_at,
           CASE WHEN _domain.replies THEN _message ELSE _message -> 'data' END,
           l.msg_id, l.lease_read_ct, l.attempts, l.max_attempts, l.lease_expires_at, l.id, l.batch_id
    FROM leased l;
END;
$function$;
