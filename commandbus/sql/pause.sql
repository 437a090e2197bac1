-- Stops receiving in a domain, or lets it go on. Sending is not stopped. Answers whether that changed anything.
CREATE OR REPLACE FUNCTION commandbus.pause(
    domain text, paused boolean DEFAULT true, operator text DEFAULT NULL, reason text DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM commandbus.require_domain(pause.domain);
    UPDATE public.command_bus_domain d SET paused = pause.paused
    WHERE d.name = pause.domain AND d.paused <> pause.paused;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO public.command_bus_audit (domain, event_type, ts, details_json)
    VALUES (pause.domain, CASE WHEN pause.paused THEN 'DOMAIN_PAUSED' ELSE 'DOMAIN_RESUMED' END, clock_timestamp(),
            jsonb_build_object('operator', pause.operator, 'reason', pause.reason));
    IF NOT pause.paused THEN
        PERFORM pg_notify('commandbus.' || pause.domain, '');
    END IF;
    RETURN true;
END;
$function$;
