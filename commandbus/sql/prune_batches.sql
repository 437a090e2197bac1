-- Removes up to `qty` batches of a domain that completed before `before`, once commandbus.prune_commands has removed the
-- last of their commands. One whose on_complete command could not be sent stays until somebody has seen to that. Answers
-- how many.
CREATE OR REPLACE FUNCTION commandbus.prune_batches(domain text, before timestamptz, qty integer)
RETURNS integer
LANGUAGE plpgsql
STRICT
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
DECLARE
    _pruned integer;
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.require_domain(prune_batches.domain);
    DELETE FROM public.command_bus_batch p
    WHERE p.batch_id = ANY (ARRAY(
        SELECT b.batch_id
        FROM public.command_bus_batch b
        WHERE b.domain = prune_batches.domain AND b.completed_at < prune_batches.before
          AND b.callback_error IS NULL
          AND (SELECT c.id FROM public.command_bus_command c WHERE c.batch_id = b.batch_id LIMIT 1) IS NULL  -- as in rows_of
        ORDER BY b.domain, b.completed_at
        LIMIT prune_batches.qty
        FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS _pruned = ROW_COUNT;
    RETURN _pruned;
END;
$function$;
