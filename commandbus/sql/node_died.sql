-- For the supervisor that has seen a process die: its commands need not wait for the end of their leases. Those that it
-- had not started are released. Those in the given ranges of msg_id were running, and become suspects, and so does what
-- it ran in isolation; unless the supervisor has `killed` the process itself. Answers how many were released, how many
-- accused, and how many are left because somebody has locked them: most likely the session of the dead process, which
-- PostgreSQL is about to end. Ask again for these.
CREATE OR REPLACE FUNCTION commandbus.node_died(
    domain text,
    node_id uuid,
    started_from bigint[] DEFAULT '{}',
    started_to bigint[] DEFAULT '{}',
    killed boolean DEFAULT false
)
RETURNS TABLE (released bigint, accused bigint, remaining bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _suspects uuid[];
    _ids uuid[];
    _msg_ids bigint[];
    _read_cts integer[];
BEGIN
    PERFORM commandbus.require_read_committed();

    UPDATE public.command_bus_node n SET stopped_at = coalesce(n.stopped_at, clock_timestamp())
    WHERE n.node_id = node_died.node_id;
    PERFORM commandbus.clear_idle(node_died.node_id);

    SELECT array_agg(l.command_id) FILTER (WHERE l.started AND NOT l.locked),
           array_agg(l.command_id) FILTER (WHERE NOT l.started AND NOT l.locked),
           array_agg(l.msg_id) FILTER (WHERE NOT l.started AND NOT l.locked),
           array_agg(l.read_ct) FILTER (WHERE NOT l.started AND NOT l.locked),
           count(*) FILTER (WHERE l.locked)
    INTO _suspects, _ids, _msg_ids, _read_cts, remaining
    FROM (
        SELECT h.*, NOT node_died.killed AND (h.suspect OR EXISTS (
            SELECT 1 FROM unnest(node_died.started_from, node_died.started_to) AS s(low, high)
            WHERE h.msg_id BETWEEN s.low AND s.high
        )) AS started
        FROM commandbus.leases_of(node_died.domain, node_died.node_id) AS h
    ) AS l;

    SELECT count(*) INTO released FROM commandbus.release(node_died.domain, _ids, _msg_ids, _read_cts);
    SELECT count(*) INTO accused FROM commandbus.accuse(node_died.domain, _suspects, NULL, true);
    RETURN NEXT;
END;
$function$;

-- Releases what is leased to a node, except the msg_ids that it holds: for a worker that has lost its connection, and
-- with it perhaps the answer of a call that leased something.
CREATE OR REPLACE FUNCTION commandbus.release_unknown(domain text, node_id uuid, held bigint[])
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _ids uuid[];
    _msg_ids bigint[];
    _read_cts integer[];
BEGIN
    SELECT array_agg(l.command_id), array_agg(l.msg_id), array_agg(l.read_ct)
    INTO _ids, _msg_ids, _read_cts
    FROM commandbus.leases_of(release_unknown.domain, release_unknown.node_id) AS l
    WHERE l.msg_id <> ALL (release_unknown.held) AND NOT l.locked;
    RETURN QUERY SELECT commandbus.release(release_unknown.domain, _ids, _msg_ids, _read_cts);
END;
$function$;

-- The leases that a node has; locks those that nobody else has locked. It reads the whole queue: an index on node_id
-- would make every receive write more, and this is asked for only after a crash.
CREATE OR REPLACE FUNCTION commandbus.leases_of(domain text, node_id uuid)
RETURNS TABLE (command_id uuid, msg_id bigint, read_ct integer, suspect boolean, locked boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
#variable_conflict use_column
DECLARE
    _ids uuid[];
    _rows bigint[];
    _ours bigint[];
BEGIN
    EXECUTE format(
        'SELECT array_agg(commandbus.command_id_of(q.message)) FROM pgmq.%I q WHERE q.read_ct > 0',
        'q_' || commandbus.queue_of(leases_of.domain))
    INTO _ids;
    SELECT array_agg(c.id) INTO _rows
    FROM public.command_bus_command c
    WHERE c.id = ANY (commandbus.rows_of(leases_of.domain, _ids))
      AND c.node_id = leases_of.node_id AND c.lease_read_ct IS NOT NULL;
    _ours := ARRAY(
        SELECT c.id FROM public.command_bus_command c
        WHERE c.id = ANY (_rows) AND c.node_id = leases_of.node_id AND c.lease_read_ct IS NOT NULL
        ORDER BY c.id
        FOR UPDATE SKIP LOCKED
    );
    RETURN QUERY
    SELECT c.command_id, c.msg_id, c.lease_read_ct, c.suspect, c.id <> ALL (_ours)
    FROM public.command_bus_command c
    WHERE c.id = ANY (_rows) AND c.node_id = leases_of.node_id AND c.lease_read_ct IS NOT NULL;
END;
$function$;
