-- Counts the commands of a batch that is not complete, and corrects the batch where it says something else. Answers what
-- was wrong, and writes it to the audit. Of a complete one, sends the on_complete command that could not be sent: under a
-- new id, if its own was taken by another. If that fails again, the answer says so in `after`.
--
-- Nobody has to stop for it: each change of a command commits together with its count, so at any moment the batch's row
-- and what is not folded yet say the same as the commands. What differs is wrong.
CREATE OR REPLACE FUNCTION commandbus.repair_batch(domain text, batch_id uuid, operator text DEFAULT NULL)
RETURNS TABLE (what text, before text, after text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
#variable_conflict use_column
DECLARE
    _batch public.command_bus_batch;
    _changes jsonb;
BEGIN
    PERFORM commandbus.require_read_committed();
    SELECT b.* INTO _batch
    FROM public.command_bus_batch b
    WHERE b.batch_id = repair_batch.batch_id AND b.domain IS NOT DISTINCT FROM repair_batch.domain  -- as in rows_of
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM commandbus.raise_unknown_batch(repair_batch.domain, repair_batch.batch_id);
    END IF;
    IF _batch.completed_at IS NULL THEN
        _changes := commandbus.recount_batch(_batch);
    ELSIF _batch.callback_error IS NOT NULL THEN
        _changes := commandbus.call_back_again(_batch);
    END IF;
    IF _changes IS NOT NULL AND NOT _changes @? '$[*] ? (@.what == "callback_error" && @.after != null)' THEN
        INSERT INTO public.command_bus_audit (domain, batch_id, event_type, ts, details_json)
        VALUES (_batch.domain, _batch.batch_id, 'BATCH_REPAIRED', clock_timestamp(),
                jsonb_build_object('changes', _changes)
                    || CASE WHEN repair_batch.operator IS NULL THEN '{}'
                            ELSE jsonb_build_object('operator', repair_batch.operator) END);
    END IF;
    RETURN QUERY SELECT r.* FROM jsonb_to_recordset(_changes) AS r(what text, before text, after text);
END;
$function$;

-- Answers what was wrong: an array of {"what", "before", "after"}.
CREATE OR REPLACE FUNCTION commandbus.recount_batch(batch public.command_bus_batch)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _is record;
BEGIN
    SELECT c.*, d.* INTO _is
    FROM (
        SELECT count(*) AS total,
               count(*) FILTER (WHERE c.status = 'COMPLETED') AS completed,
               count(*) FILTER (WHERE c.status = 'FAILED') AS failed,
               count(*) FILTER (WHERE c.status = 'CANCELED') AS canceled,
               count(*) FILTER (WHERE c.status = 'IN_TROUBLESHOOTING_QUEUE') AS in_troubleshooting
        FROM public.command_bus_command c
        WHERE c.batch_id = (batch).batch_id
    ) AS c
    CROSS JOIN (
        SELECT coalesce(sum(d.total_count), 0) AS new_total,
               coalesce(sum(d.completed_count), 0) AS new_completed,
               coalesce(sum(d.failed_count), 0) AS new_failed,
               coalesce(sum(d.canceled_count), 0) AS new_canceled,
               coalesce(sum(d.in_troubleshooting_count), 0) AS new_in_troubleshooting
        FROM public.command_bus_batch_delta d
        WHERE d.batch_id = (batch).batch_id
    ) AS d;
    UPDATE public.command_bus_batch b
    SET total_count = _is.total - _is.new_total,
        completed_count = _is.completed - _is.new_completed,
        failed_count = _is.failed - _is.new_failed,
        canceled_count = _is.canceled - _is.new_canceled,
        in_troubleshooting_count = _is.in_troubleshooting - _is.new_in_troubleshooting
    WHERE b.batch_id = (batch).batch_id;
    INSERT INTO public.command_bus_batch_delta (batch_id, at)  -- so that fold_batches looks at it
    VALUES ((batch).batch_id, (batch).updated_at);

    RETURN (
        SELECT jsonb_agg(to_jsonb(r) - 'number' ORDER BY r.number)
        FROM (VALUES
            (1, 'total_count', (batch).total_count + _is.new_total, _is.total),
            (2, 'completed_count', (batch).completed_count + _is.new_completed, _is.completed),
            (3, 'failed_count', (batch).failed_count + _is.new_failed, _is.failed),
            (4, 'canceled_count', (batch).canceled_count + _is.new_canceled, _is.canceled),
            (5, 'in_troubleshooting_count', (batch).in_troubleshooting_count + _is.new_in_troubleshooting,
             _is.in_troubleshooting)
        ) AS r(number, what, before, after)
        WHERE r.before <> r.after
    );
END;
$function$;

-- Answers as recount_batch.
CREATE OR REPLACE FUNCTION commandbus.call_back_again(batch public.command_bus_batch)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _id uuid := ((batch).on_complete ->> 'command_id')::uuid;
    _changes jsonb := '[]';
    _error text := (batch).callback_error;
BEGIN
    IF commandbus.was_sent(commandbus.require_domain((batch).domain), _id) THEN
        batch.on_complete := (batch).on_complete || jsonb_build_object('command_id', gen_random_uuid());
        _changes := jsonb_build_array(jsonb_build_object(
            'what', 'on_complete', 'before', _id, 'after', (batch).on_complete -> 'command_id'));
    END IF;
    batch.callback_error := commandbus.call_back(batch);
    IF (batch).callback_error IS NULL THEN
        UPDATE public.command_bus_batch b
        SET on_complete = (batch).on_complete, callback_error = NULL, callback_sent_at = clock_timestamp()
        WHERE b.batch_id = (batch).batch_id;
    ELSE
        _changes := '[]';
        UPDATE public.command_bus_batch b
        SET callback_error = (batch).callback_error
        WHERE b.batch_id = (batch).batch_id;
    END IF;
    RETURN _changes || jsonb_build_object('what', 'callback_error', 'before', _error, 'after', (batch).callback_error);
END;
$function$;
