-- Counts the commands of a batch that is not complete, and corrects the batch where it says something else. Answers what
-- was wrong. Of a complete one, tries again to send an on_complete command that could not be sent; if that fails again, the
-- answer says so in `after`.
--
-- Nobody has to stop for it: each change of a command commits together with its count, so at any moment the batch's row
-- and what is not folded yet say the same as the commands. What differs is wrong.
CREATE OR REPLACE FUNCTION commandbus.repair_batch(domain text, batch_id uuid)
RETURNS TABLE (what text, before text, after text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
#variable_conflict use_column
DECLARE
    _batch public.command_bus_batch;
    _is record;
BEGIN
    PERFORM commandbus.require_read_committed();
    SELECT b.* INTO _batch
    FROM public.command_bus_batch b
    WHERE b.batch_id = repair_batch.batch_id AND b.domain = repair_batch.domain
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM commandbus.raise_unknown_batch(repair_batch.domain, repair_batch.batch_id);
    END IF;
    IF _batch.completed_at IS NOT NULL THEN
        IF _batch.callback_error IS NOT NULL THEN
            what := 'callback_error';
            before := _batch.callback_error;
            after := commandbus.call_back(_batch);
            UPDATE public.command_bus_batch b
            SET callback_error = repair_batch.after,
                callback_sent_at = CASE WHEN repair_batch.after IS NULL THEN clock_timestamp() END
            WHERE b.batch_id = _batch.batch_id;
            RETURN NEXT;
        END IF;
        RETURN;
    END IF;

    SELECT c.*, d.* INTO _is
    FROM (
        SELECT count(*) AS total,
               count(*) FILTER (WHERE c.status = 'COMPLETED') AS completed,
               count(*) FILTER (WHERE c.status = 'FAILED') AS failed,
               count(*) FILTER (WHERE c.status = 'CANCELED') AS canceled,
               count(*) FILTER (WHERE c.status = 'IN_TROUBLESHOOTING_QUEUE') AS in_troubleshooting
        FROM public.command_bus_command c
        WHERE c.batch_id = repair_batch.batch_id
    ) AS c
    CROSS JOIN (
        SELECT coalesce(sum(d.total_count), 0) AS new_total,
               coalesce(sum(d.completed_count), 0) AS new_completed,
               coalesce(sum(d.failed_count), 0) AS new_failed,
               coalesce(sum(d.canceled_count), 0) AS new_canceled,
               coalesce(sum(d.in_troubleshooting_count), 0) AS new_in_troubleshooting
        FROM public.command_bus_batch_delta d
        WHERE d.batch_id = repair_batch.batch_id
    ) AS d;
    UPDATE public.command_bus_batch b
    SET total_count = _is.total - _is.new_total,
        completed_count = _is.completed - _is.new_completed,
        failed_count = _is.failed - _is.new_failed,
        canceled_count = _is.canceled - _is.new_canceled,
        in_troubleshooting_count = _is.in_troubleshooting - _is.new_in_troubleshooting
    WHERE b.batch_id = repair_batch.batch_id;
    INSERT INTO public.command_bus_batch_delta (batch_id, at)  -- so that fold_batches looks at it
    VALUES (repair_batch.batch_id, _batch.updated_at);

    RETURN QUERY
    SELECT r.what, r.before::text, r.after::text
    FROM (VALUES
        ('total_count', _batch.total_count + _is.new_total, _is.total),
        ('completed_count', _batch.completed_count + _is.new_completed, _is.completed),
        ('failed_count', _batch.failed_count + _is.new_failed, _is.failed),
        ('canceled_count', _batch.canceled_count + _is.new_canceled, _is.canceled),
        ('in_troubleshooting_count', _batch.in_troubleshooting_count + _is.new_in_troubleshooting, _is.in_troubleshooting)
    ) AS r(what, before, after)
    WHERE r.before <> r.after;
END;
$function$;
