-- A worker that found nothing says so, commits, looks once more, and then waits for a notification.
CREATE OR REPLACE FUNCTION commandbus.set_idle(domains text[], node_id uuid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO public.command_bus_idle_worker (domain, node_id, idle_since)
    SELECT d, set_idle.node_id, clock_timestamp() FROM unnest(set_idle.domains) AS d
    -- Not by ON CONFLICT, which would wait for a transaction that is about to wake us.
    WHERE NOT EXISTS (
        SELECT FROM public.command_bus_idle_worker AS i WHERE i.domain = d AND i.node_id = set_idle.node_id)
$function$;

CREATE OR REPLACE FUNCTION commandbus.clear_idle(node_id uuid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    WITH mine AS MATERIALIZED (
        SELECT o.domain FROM public.command_bus_idle_worker AS o WHERE o.node_id = clear_idle.node_id
        FOR UPDATE SKIP LOCKED
    )
    DELETE FROM public.command_bus_idle_worker AS i USING mine
    WHERE i.node_id = clear_idle.node_id AND i.domain = mine.domain
$function$;

-- Wakes one idle worker of the domain, if there is one, and no other. To be called after the commit of what it shall
-- find, or as the last thing of a short transaction: until its end nobody else can wake that worker. And a
-- notification inside a busy sender's transaction makes commits wait for each other. It is the one that has worked
-- last, whose processes and plans are warm, so that the others can sleep.
CREATE OR REPLACE FUNCTION commandbus.wake(domain text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _node uuid;
BEGIN
    IF NOT EXISTS (SELECT FROM public.command_bus_idle_worker AS i WHERE i.domain = wake.domain) THEN
        RETURN false;  -- as a rule, and this is cheaper
    END IF;
    WITH one AS MATERIALIZED (
        SELECT o.node_id FROM public.command_bus_idle_worker AS o
        WHERE o.domain = wake.domain
        ORDER BY o.idle_since DESC
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    DELETE FROM public.command_bus_idle_worker AS i USING one
    WHERE i.domain = wake.domain AND i.node_id = one.node_id
    RETURNING i.node_id INTO _node;
    IF _node IS NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('commandbus.node.' || _node, '');
    RETURN true;
END;
$function$;
