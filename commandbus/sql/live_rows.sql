-- The rows of the commands that have a message in the domain's queue: all that wait or run, and no others but those that
-- ended a moment ago. Null if there are more than `at_most`, or no such queue. (No index can say it: an index on the status
-- would have to be written at every change of it.)
CREATE OR REPLACE FUNCTION commandbus.live_rows(domain text, at_most integer DEFAULT 2000)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    _queue text := 'q_' || commandbus.queue_of(live_rows.domain);
    _ids uuid[];
    _messages bigint;
BEGIN
    IF to_regclass(format('pgmq.%I', coalesce(_queue, ''))) IS NULL THEN
        RETURN NULL;
    END IF;
    -- Counted first: messages may be large, and there may be many.
    EXECUTE format('SELECT count(*) FROM (SELECT FROM pgmq.%I q ORDER BY q.msg_id LIMIT $1 + 1) AS m', _queue)
    INTO _messages
    USING live_rows.at_most;
    IF _messages > live_rows.at_most THEN
        RETURN NULL;
    END IF;
    EXECUTE format('SELECT array_agg(commandbus.command_id_of(q.message)) FROM pgmq.%I q', _queue) INTO _ids;
    RETURN array_remove(commandbus.rows_of(live_rows.domain, coalesce(_ids, '{}')), NULL);
END;
$function$;
