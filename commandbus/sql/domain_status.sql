-- What a domain has to do at this moment. Each count ends at `at_most` + 1, which says "more than that": the call costs no
-- more for a hundred million messages than for a hundred thousand.
--   waiting             ready now
--   delayed             the time of a retry or of a delay is not over
--   running             leased. Which of the hidden messages are can only be learnt from their commands, and only so many of
--                       these are looked at, in the order in which they become visible: leases are short, so they come
--                       first. `more_running` says that not all of them were, up to an hour from now.
--   in_troubleshooting
--   replies             ready now, in the queue that this domain replies to
--   oldest_ready_seconds  how long the first of those that are ready has been so
--   held                the number of the running ones by node
-- A count is null if its queue does not exist.
CREATE OR REPLACE FUNCTION commandbus.domain_status(domain text, at_most integer DEFAULT 100000)
RETURNS TABLE (
    paused boolean,
    waiting bigint,
    delayed bigint,
    running bigint,
    more_running boolean,
    in_troubleshooting bigint,
    replies bigint,
    oldest_ready_seconds double precision,
    held jsonb
)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
#variable_conflict use_column
DECLARE
    _domain public.command_bus_domain := commandbus.require_domain(domain_status.domain);
    _queue text := _domain.queue_name;
    _now timestamptz := clock_timestamp();
    _looked_at integer := least(domain_status.at_most, 10000);
    _oldest timestamptz;
    _ids uuid[];
    _looked integer;
    _beyond timestamptz;
BEGIN
    paused := _domain.paused;
    waiting := commandbus.count_messages(_queue, '-infinity', _now, domain_status.at_most);
    replies := commandbus.count_messages(_domain.reply_queue, '-infinity', _now, domain_status.at_most);

    -- The order of the three columns leaves one index to choose, and comparing them as a row lets it begin and end at the
    -- domain.
    SELECT count(*) INTO in_troubleshooting
    FROM (
        SELECT FROM public.command_bus_command c
        WHERE (c.rare_status, c.domain) >= ('IN_TROUBLESHOOTING_QUEUE', domain_status.domain)
          AND (c.rare_status, c.domain) <= ('IN_TROUBLESHOOTING_QUEUE', domain_status.domain)
          AND c.rare_status IS NOT NULL
        ORDER BY c.rare_status, c.domain, c.command_type
        LIMIT domain_status.at_most + 1
    ) AS t;

    IF waiting IS NOT NULL THEN
        EXECUTE format('SELECT q.vt FROM pgmq.%I q WHERE q.vt <= $1 ORDER BY q.vt LIMIT 1', 'q_' || _queue)
        INTO _oldest
        USING _now;
        oldest_ready_seconds := extract(epoch FROM _now - _oldest);

        EXECUTE format(
            $query$
                SELECT array_agg(commandbus.command_id_of(r.message)), count(*)
                FROM (
                    SELECT h.message
                    FROM (
                        SELECT q.message, q.read_ct FROM pgmq.%I q WHERE q.vt > $1 ORDER BY q.vt LIMIT $2
                    ) AS h
                    WHERE h.read_ct > 0
                    LIMIT $3
                ) AS r
            $query$, 'q_' || _queue)
        INTO _ids, _looked
        USING _now, domain_status.at_most + 1, _looked_at + 1;
        SELECT coalesce(sum(n.leases), 0),
               coalesce(jsonb_object_agg(n.node_id, n.leases) FILTER (WHERE n.node_id IS NOT NULL), '{}')
        INTO running, held
        FROM (
            SELECT c.node_id, count(*) AS leases
            FROM public.command_bus_command c
            WHERE c.id = ANY (commandbus.rows_of(domain_status.domain, _ids)) AND c.lease_read_ct IS NOT NULL
            GROUP BY c.node_id
        ) AS n;
        EXECUTE format('SELECT q.vt FROM pgmq.%I q WHERE q.vt > $1 ORDER BY q.vt OFFSET $2 LIMIT 1', 'q_' || _queue)
        INTO _beyond
        USING _now, domain_status.at_most;
        more_running := _looked > _looked_at OR coalesce(_beyond < _now + interval '1 hour', false);
        delayed := commandbus.count_messages(
            _queue, _now, 'infinity', domain_status.at_most + running::integer) - running;
    END IF;
    RETURN NEXT;
END;
$function$;

-- The messages of a queue that become visible after `after` and until `until`; at most one more than `at_most`. Null if
-- there is no such queue. (PGMQ's own metrics read the whole queue.)
CREATE OR REPLACE FUNCTION commandbus.count_messages(
    queue text, after timestamptz, until timestamptz, at_most integer
)
RETURNS bigint
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
DECLARE
    _messages bigint;
BEGIN
    IF count_messages.queue IS NULL OR to_regclass(format('pgmq.%I', 'q_' || count_messages.queue)) IS NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format(
        'SELECT count(*) FROM (SELECT FROM pgmq.%I q WHERE q.vt > $1 AND q.vt <= $2 ORDER BY q.vt LIMIT $3) AS m',
        'q_' || count_messages.queue)
    INTO _messages
    USING count_messages.after, count_messages.until, count_messages.at_most + 1;
    RETURN _messages;
END;
$function$;
