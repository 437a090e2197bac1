-- Moves the end of leases to `seconds` from now. Answers the ids whose lease is still held, and whether it was moved: that
-- of a command which somebody has locked at this moment is not. It is being finished, or the next call moves it.
CREATE OR REPLACE FUNCTION commandbus.extend(
    domain text, command_ids uuid[], msg_ids bigint[], read_cts integer[], seconds double precision
)
RETURNS TABLE (command_id uuid, moved boolean)
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
    _until timestamptz := clock_timestamp() + make_interval(secs => extend.seconds);
    _msg_ids bigint[];
BEGIN
    PERFORM commandbus.require_read_committed();
    _rows := commandbus.rows_of(extend.domain, extend.command_ids);

    WITH held AS MATERIALIZED (
        SELECT c.id
        FROM unnest(_rows, extend.msg_ids, extend.read_cts) AS w(id, msg_id, read_ct)
        JOIN public.command_bus_command c ON c.id = ANY (ARRAY[w.id]) AND c.msg_id = w.msg_id AND c.lease_read_ct = w.read_ct
        ORDER BY w.id
        FOR UPDATE OF c SKIP LOCKED
    ), extended AS (
        UPDATE public.command_bus_command c
        SET lease_expires_at = _until
        FROM held h
        WHERE c.id = ANY (ARRAY[h.id])
        RETURNING c.msg_id
    )
    SELECT array_agg(e.msg_id) INTO _msg_ids FROM extended e;

    IF _msg_ids IS NOT NULL THEN
        PERFORM pgmq.set_vt(commandbus.queue_of(extend.domain), _msg_ids, _until);
    END IF;
    RETURN QUERY
    SELECT c.command_id, coalesce(c.msg_id = ANY (_msg_ids), false)
    FROM unnest(_rows, extend.msg_ids, extend.read_cts) AS w(id, msg_id, read_ct)
    JOIN public.command_bus_command c ON c.id = ANY (ARRAY[w.id]) AND c.msg_id = w.msg_id AND c.lease_read_ct = w.read_ct;
END;
$function$;
