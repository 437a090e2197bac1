-- Stops receiving in a domain, or lets it go on. Sending is not stopped. Answers whether that changed anything.
CREATE OR REPLACE FUNCTION commandbus.pause(domain text, paused boolean DEFAULT true)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _changed boolean;
BEGIN
    PERFORM commandbus.require_domain(pause.domain);
    UPDATE public.command_bus_domain d SET paused = pause.paused
    WHERE d.name = pause.domain AND d.paused <> pause.paused;
    _changed := FOUND;
    IF _changed AND NOT pause.paused THEN
        PERFORM pg_notify('commandbus.' || pause.domain, '');
    END IF;
    RETURN _changed;
END;
$function$;
