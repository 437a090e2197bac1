-- Marks a batch as canceled and seals it. Its commands are canceled afterwards, in as many transactions as that takes
-- (commandbus.cancel): until then, and if the one who does it dies, they are as they were. Answers whether that is new;
-- a batch that has completed is left alone and is an error.
CREATE OR REPLACE FUNCTION commandbus.cancel_batch(
    domain text, batch_id uuid, reason text, operator text DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _batch public.command_bus_batch;
BEGIN
    PERFORM commandbus.require_read_committed();
    _batch := commandbus.lock_batch(cancel_batch.domain, cancel_batch.batch_id);
    IF _batch.completed_at IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB006',
            MESSAGE = format('batch %s cannot be canceled: its status is %s', _batch.batch_id, _batch.status),
            HINT = 'All of its commands have ended';
    END IF;
    IF _batch.canceled_at IS NOT NULL THEN
        RETURN false;
    END IF;
    UPDATE public.command_bus_batch b
    SET canceled_at = clock_timestamp(),
        sealed_at = coalesce(b.sealed_at, clock_timestamp())
    WHERE b.batch_id = cancel_batch.batch_id;
    INSERT INTO public.command_bus_audit (domain, batch_id, event_type, ts, details_json)
    VALUES (cancel_batch.domain, cancel_batch.batch_id, 'BATCH_CANCELED', clock_timestamp(),
            jsonb_build_object('operator', cancel_batch.operator, 'reason', cancel_batch.reason));
    INSERT INTO public.command_bus_batch_delta (batch_id, at)  -- so that fold_batches looks at it
    VALUES (cancel_batch.batch_id, clock_timestamp());
    RETURN true;
END;
$function$;
