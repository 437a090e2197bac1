-- Ends the adding of commands to a batch; from now on it can complete. Waits for those who are just adding. Answers
-- whether it was open. If another number of commands was expected than it has, that is an error, unless `allow_incomplete`.
CREATE OR REPLACE FUNCTION commandbus.seal_batch(
    domain text, batch_id uuid, allow_incomplete boolean DEFAULT false, operator text DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _batch public.command_bus_batch;
    _total bigint;
BEGIN
    PERFORM commandbus.require_read_committed();
    _batch := commandbus.lock_batch(seal_batch.domain, seal_batch.batch_id);
    IF _batch.sealed_at IS NOT NULL THEN
        RETURN false;
    END IF;
    SELECT _batch.total_count + coalesce(sum(d.total_count), 0) INTO _total
    FROM public.command_bus_batch_delta d
    WHERE d.batch_id = seal_batch.batch_id;
    IF _total <> _batch.expected_count AND NOT seal_batch.allow_incomplete THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB006',
            MESSAGE = format('batch %s has %s commands, but %s were expected', _batch.batch_id, _total, _batch.expected_count),
            HINT = 'Add what is missing and seal it then, or seal it with allow_incomplete';
    END IF;
    UPDATE public.command_bus_batch b SET sealed_at = clock_timestamp() WHERE b.batch_id = seal_batch.batch_id;
    INSERT INTO public.command_bus_audit (domain, batch_id, event_type, ts, details_json)
    VALUES (seal_batch.domain, seal_batch.batch_id, 'BATCH_SEALED', clock_timestamp(),
            jsonb_build_object('total_count', _total)
                || CASE WHEN seal_batch.operator IS NULL THEN '{}'
                        ELSE jsonb_build_object('operator', seal_batch.operator) END);
    INSERT INTO public.command_bus_batch_delta (batch_id, at)  -- so that fold_batches looks at it
    VALUES (seal_batch.batch_id, clock_timestamp());
    RETURN true;
END;
$function$;

-- The row of a batch, locked against everybody: those who add, who fold, who seal.
CREATE OR REPLACE FUNCTION commandbus.lock_batch(domain text, batch_id uuid)
RETURNS public.command_bus_batch
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _batch public.command_bus_batch;
BEGIN
    PERFORM commandbus.require_domain(lock_batch.domain);
    PERFORM pg_advisory_xact_lock(commandbus.batch_key(lock_batch.batch_id));  -- as join_batch
    SELECT b.* INTO _batch
    FROM public.command_bus_batch b
    WHERE b.batch_id = lock_batch.batch_id AND b.domain IS NOT DISTINCT FROM lock_batch.domain  -- as in rows_of
    FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM commandbus.raise_unknown_batch(lock_batch.domain, lock_batch.batch_id);
    END IF;
    RETURN _batch;
END;
$function$;
