-- What to do about a lease that has run out, according to what the receiving node (`judge`) can know of its holder:
--   SUSPECT  the holder is dead: it has ended, or was not heard of for several of its heartbeats. Its commands may have
--            killed it.
--   AGAIN    the holder lives, and has not extended the lease although it had the time: it does not know of it.
--   LEAVE    it may still be extended. So it is, too, while the judge was not heard of for a while itself, or has only
--            begun: then it was perhaps the database that nobody could reach. Who has only begun may judge all the same
--            after a very long silence, for where workers live for seconds only there is nobody else.
-- Who leases without a node has no heartbeat, and is never accused.
CREATE OR REPLACE FUNCTION commandbus.judge_lease(node_id uuid, lease_expires_at timestamptz, judge uuid)
RETURNS text
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _now timestamptz := clock_timestamp();
    _node public.command_bus_node;
    _patience interval;
BEGIN
    IF judge_lease.node_id IS NULL THEN
        RETURN 'AGAIN';
    END IF;
    SELECT n.* INTO _node FROM public.command_bus_node n WHERE n.node_id = judge_lease.node_id;
    IF NOT FOUND OR _node.stopped_at IS NOT NULL THEN
        RETURN 'SUSPECT';
    END IF;
    _patience := commandbus.patience(_node.heartbeat_seconds);
    IF _node.heartbeat_at > _now - _patience THEN
        RETURN CASE WHEN greatest(judge_lease.lease_expires_at, _node.heard_since) < _now - _patience
                    THEN 'AGAIN' ELSE 'LEAVE' END;
    END IF;
    IF EXISTS (
        SELECT 1 FROM public.command_bus_node n
        WHERE n.node_id = judge_lease.judge
          AND (n.heartbeat_at <= _now - commandbus.patience(n.heartbeat_seconds)
               OR n.heard_since > _now - _patience
                  AND (n.heard_since > n.started_at OR _node.heartbeat_at > _now - 10 * _patience))
    ) THEN
        RETURN 'LEAVE';
    END IF;
    RETURN 'SUSPECT';
END;
$function$;

-- How long to wait for the next sign of life.
CREATE OR REPLACE FUNCTION commandbus.patience(heartbeat_seconds double precision)
RETURNS interval
LANGUAGE sql
IMMUTABLE
AS $function$
    SELECT pg_catalog.make_interval(secs => 3.5 OPERATOR(pg_catalog.*) heartbeat_seconds)
$function$;

-- A sign of life.
CREATE OR REPLACE FUNCTION commandbus.heartbeat(node_id uuid)
RETURNS boolean
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    UPDATE public.command_bus_node AS n
    SET heartbeat_at = clock_timestamp(),
        heard_since = CASE WHEN n.heartbeat_at > clock_timestamp() - commandbus.patience(n.heartbeat_seconds)
                           THEN n.heard_since ELSE clock_timestamp() END
    WHERE n.node_id = heartbeat.node_id
    RETURNING n.stop_requested_at IS NOT NULL
$function$;
