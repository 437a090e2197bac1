-- A worker that found nothing says so, commits, looks once more, and then waits for a notification.
CREATE OR REPLACE FUNCTION commandbus.set_idle(domains text[], node_id uuid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO public.command_bus_idle_worker (domain, node_id, idle_since)
    SELECT d, set_idle.node_id, clock_timestamp() FROM unnest(set_idle.domains) AS d ORDER BY d
    ON CONFLICT DO NOTHING
$function$;

CREATE OR REPLACE FUNCTION commandbus.clear_idle(node_id uuid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    DELETE FROM public.command_bus_idle_worker AS i WHERE i.node_id = clear_idle.node_id
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
    DELETE FROM public.command_bus_idle_worker AS i
    WHERE (i.domain, i.node_id) IN (
        SELECT o.domain, o.node_id FROM public.command_bus_idle_worker AS o
        WHERE o.domain = wake.domain
        ORDER BY o.idle_since DESC
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    )
    RETURNING i.node_id INTO _node;
    IF _node IS NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('commandbus.node.' || _node, '');
    RETURN true;
END;
$function$;
