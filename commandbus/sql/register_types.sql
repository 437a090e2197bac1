-- Stores the retry limit of each command type, for senders that do not know the handlers, and that it has a handler.
CREATE OR REPLACE FUNCTION commandbus.register_types(domain text, command_types text[], max_attempts integer[])
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO public.command_bus_command_type AS t (domain, command_type, max_attempts)
    SELECT register_types.domain, w.command_type, w.max_attempts
    FROM unnest(register_types.command_types, register_types.max_attempts) AS w(command_type, max_attempts)
    ORDER BY w.command_type
    ON CONFLICT (domain, command_type) DO UPDATE
    SET max_attempts = excluded.max_attempts, unhandled_since = NULL
    WHERE t.max_attempts IS DISTINCT FROM excluded.max_attempts OR t.unhandled_since IS NOT NULL
$function$;
