-- Asks a node to end what it runs, give back the rest and stop. It sees that with its next heartbeat. Answers whether it
-- was asked: false for one that has stopped or was asked before.
CREATE OR REPLACE FUNCTION commandbus.stop_node(node_id uuid, operator text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _node public.command_bus_node;
BEGIN
    UPDATE public.command_bus_node n SET stop_requested_at = clock_timestamp()
    WHERE n.node_id = stop_node.node_id AND n.stop_requested_at IS NULL AND n.stopped_at IS NULL
    RETURNING n.* INTO _node;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO public.command_bus_audit (domain, event_type, ts, details_json)
    SELECT d, 'NODE_STOP_REQUESTED', clock_timestamp(),
           jsonb_build_object('operator', stop_node.operator, 'reason', stop_node.reason,
                              'node', _node.name, 'node_id', _node.node_id)
    FROM jsonb_array_elements_text(_node.domains) AS d;
    RETURN true;
END;
$function$;
