-- Gives leased commands back that were not started: visible after `delay` seconds, and the attempt is theirs again.
CREATE OR REPLACE FUNCTION commandbus.release(
    domain text, command_ids uuid[], msg_ids bigint[], read_cts integer[], delay double precision DEFAULT 0
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
    _now timestamptz := clock_timestamp();
    _ids uuid[];
    _msg_ids bigint[];
BEGIN
    PERFORM commandbus.require_read_committed();
    _rows := commandbus.rows_of(release.domain, release.command_ids);

    WITH held AS MATERIALIZED (
        SELECT c.id
        FROM unnest(_rows, release.msg_ids, release.read_cts) AS w(id, msg_id, read_ct)
        JOIN public.command_bus_command c ON c.id = ANY (ARRAY[w.id]) AND c.msg_id = w.msg_id AND c.lease_read_ct = w.read_ct
        ORDER BY w.id
        FOR UPDATE OF c
    ), released AS (
        UPDATE public.command_bus_command c
        SET status = 'PENDING',
            attempts = c.attempts - 1,
            lease_read_ct = NULL,
            lease_expires_at = NULL,
            updated_at = _now
        FROM held h
        WHERE c.id = ANY (ARRAY[h.id])
        RETURNING c.command_id, c.batch_id, c.msg_id, c.node_id
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT release.domain, r.command_id, r.batch_id, 'RELEASED', _now, jsonb_build_object('node_id', r.node_id)
        FROM released r
    )
    SELECT array_agg(r.command_id), array_agg(r.msg_id) INTO _ids, _msg_ids FROM released r;

    IF _ids IS NOT NULL THEN
        PERFORM pgmq.set_vt(commandbus.queue_of(release.domain), _msg_ids, _now + make_interval(secs => release.delay));
        RETURN QUERY SELECT unnest(_ids);
    END IF;
END;
$function$;
