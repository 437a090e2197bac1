-- For leased commands of types that the worker has no handler for. While another living node handles the type, or while
-- nobody has done so for less than the grace period (in seconds; the domain's, unless one is given), they are given
-- back; after that they go to the Troubleshooting Queue. Either way no attempt is used up. Answers the new status per
-- command.
CREATE OR REPLACE FUNCTION commandbus.unhandled(
    domain text,
    command_ids uuid[],
    msg_ids bigint[],
    read_cts integer[],
    grace double precision DEFAULT NULL
)
RETURNS TABLE (command_id uuid, status text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
#variable_conflict use_column
DECLARE
    _domain public.command_bus_domain;
    _grace double precision;
    _now timestamptz := clock_timestamp();
    _rows bigint[] := commandbus.rows_of(unhandled.domain, unhandled.command_ids);
    _types text[];
    _orphaned text[];
    _hopeless record;
    _failed uuid[];
    _waiting record;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(unhandled.domain);
    _grace := coalesce(unhandled.grace, _domain.unknown_type_grace);

    _types := ARRAY(SELECT DISTINCT c.command_type FROM public.command_bus_command c WHERE c.id = ANY (_rows));
    SELECT array_agg(t.command_type) INTO _orphaned
    FROM unnest(_types) AS t(command_type)
    WHERE NOT EXISTS (
        SELECT 1 FROM public.command_bus_node n
        WHERE n.stopped_at IS NULL AND n.heartbeat_at > _now - interval '1 minute'
          AND commandbus.handles(n, _domain, t.command_type)
    );
    -- The clock of the grace period starts here. It is stopped when a worker with a handler is seen, here or when it
    -- starts (register_types).
    UPDATE public.command_bus_command_type t SET unhandled_since = NULL
    WHERE t.domain = unhandled.domain AND t.unhandled_since IS NOT NULL
      AND t.command_type <> ALL (coalesce(_orphaned, '{}'))
      AND t.command_type = ANY (_types);
    INSERT INTO public.command_bus_command_type AS t (domain, command_type, unhandled_since)
    SELECT unhandled.domain, o, _now FROM unnest(_orphaned) AS o ORDER BY o
    ON CONFLICT (domain, command_type) DO UPDATE SET unhandled_since = excluded.unhandled_since
    WHERE t.unhandled_since IS NULL;

    SELECT array_agg(w.command_id) AS ids, array_agg(w.msg_id) AS msg_ids, array_agg(w.read_ct) AS read_cts,
           array_agg(jsonb_build_object(
               'type', 'NoHandler', 'code', 'NO_HANDLER',
               'message', format('no handler for %s/%s in any worker for %s seconds', unhandled.domain, c.command_type,
                                 _grace))) AS errors,
           array_agg('NO_HANDLER'::text) AS reasons
    INTO _hopeless
    FROM unnest(_rows, unhandled.command_ids, unhandled.msg_ids, unhandled.read_cts)
        AS w(id, command_id, msg_id, read_ct)
    CROSS JOIN LATERAL (
        SELECT c.domain, c.command_type FROM public.command_bus_command c WHERE c.id = w.id LIMIT 1
    ) AS c
    JOIN public.command_bus_command_type t ON t.domain = c.domain AND t.command_type = c.command_type
    WHERE c.command_type = ANY (_orphaned)
      AND _now - make_interval(secs => _grace) >= greatest(t.unhandled_since, (
          SELECT max(n.heartbeat_at) FROM public.command_bus_node n
          WHERE commandbus.handles(n, _domain, t.command_type)
      ));

    IF _hopeless.ids IS NOT NULL THEN
        _failed := ARRAY(
            SELECT f.command_id
            FROM commandbus.fail(unhandled.domain, _hopeless.ids, _hopeless.msg_ids, _hopeless.read_cts,
                                 _hopeless.errors, NULL, _hopeless.reasons) AS f
        );
        UPDATE public.command_bus_command c SET attempts = c.attempts - 1
        WHERE c.id = ANY (commandbus.rows_of(unhandled.domain, _failed));
        RETURN QUERY SELECT f, 'IN_TROUBLESHOOTING_QUEUE' FROM unnest(_failed) AS f;
    END IF;

    -- The more often it came to the wrong worker, the longer the pause, so that the rest is not held up.
    FOR _waiting IN
        SELECT array_agg(w.command_id) AS ids, array_agg(w.msg_id) AS msg_ids, array_agg(w.read_ct) AS read_cts,
               power(2, least(w.read_ct, 4) - 1) AS delay
        FROM unnest(unhandled.command_ids, unhandled.msg_ids, unhandled.read_cts) AS w(command_id, msg_id, read_ct)
        WHERE w.command_id <> ALL (coalesce(_hopeless.ids, '{}'))
        GROUP BY least(w.read_ct, 4)
    LOOP
        RETURN QUERY
        SELECT r, 'PENDING' FROM commandbus.release(
            unhandled.domain, _waiting.ids, _waiting.msg_ids, _waiting.read_cts, _waiting.delay) AS r;
    END LOOP;
END;
$function$;

-- Whether a node has said that it handles a type. Of replies it says which domains it handles them of, or '*'.
CREATE OR REPLACE FUNCTION commandbus.handles(
    node public.command_bus_node, domain public.command_bus_domain, command_type text
)
RETURNS boolean
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce((node).handled_types -> (domain).name ?| CASE
        WHEN (domain).replies THEN ARRAY['*', split_part(command_type, '/', 1)]
        ELSE ARRAY[command_type] END, false)
$function$;
