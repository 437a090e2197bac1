-- The audit by what is known of its rows, the newest first (or the oldest). As in commandbus.search, it reads a bounded
-- amount: of one command, of one batch itself, of the events that are not usual, or else of all, at most about `look_through` rows.
-- `first_at` and `last_at` enclose what matches, so that whoever reads the rows needs few partitions.
CREATE OR REPLACE FUNCTION commandbus.search_audit(
    command_id uuid DEFAULT NULL,
    batch_id uuid DEFAULT NULL,
    operator text DEFAULT NULL,
    domain text DEFAULT NULL,
    event_type text DEFAULT NULL,
    since timestamptz DEFAULT NULL,
    until timestamptz DEFAULT NULL,
    beyond bigint DEFAULT NULL,
    oldest_first boolean DEFAULT false,
    at_most integer DEFAULT 1000,
    look_through integer DEFAULT 10000
)
RETURNS TABLE (matching bigint[], more boolean, next_beyond bigint, first_at timestamptz, last_at timestamptz)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_incremental_sort = off
AS $function$
DECLARE
    _usual text[] := ARRAY['SENT', 'RECEIVED', 'COMPLETED'];
    _after bigint := 0;
    _before bigint := 9223372036854775807;
    -- Each leaves one index to choose: (command_id, ts), (batch_id, ts), (event_type, audit_id) and (audit_id, ts).
    _columns text := 'a.audit_id';
    _values text := '';
    _condition text := 'true';
    _keys text[] := ARRAY['any'];
    _direction text := CASE WHEN search_audit.oldest_first THEN 'ASC' ELSE 'DESC' END;
    _share integer;
    _reached bigint;
BEGIN
    IF search_audit.since IS NOT NULL THEN
        _after := commandbus.first_at('audit', search_audit.since - interval '2 seconds') - 1;
    END IF;
    IF search_audit.until IS NOT NULL THEN
        _before := commandbus.first_at('audit', search_audit.until + interval '2 seconds');
    END IF;
    IF search_audit.oldest_first THEN
        _after := greatest(_after, search_audit.beyond);
    ELSE
        _before := least(_before, search_audit.beyond);
    END IF;

    IF search_audit.command_id IS NOT NULL THEN
        _columns := 'a.command_id, a.ts';
    ELSIF search_audit.batch_id IS NOT NULL THEN
        _columns := 'a.batch_id, a.ts';
        _condition := 'a.command_id IS NULL AND a.batch_id IS NOT NULL';
    ELSIF search_audit.operator IS NOT NULL OR NOT search_audit.event_type = ANY (_usual) THEN
        _columns := 'a.event_type, a.audit_id';
        _values := 'k.event_type, ';
        _condition := 'a.event_type NOT IN (''SENT'', ''RECEIVED'', ''COMPLETED'')';
        _keys := CASE WHEN search_audit.event_type IS NOT NULL THEN ARRAY[search_audit.event_type] ELSE ARRAY[
            'CANCELED', 'OPERATOR_RETRY', 'OPERATOR_CANCEL', 'OPERATOR_COMPLETE', 'OPERATOR_EDIT', 'DOMAIN_PAUSED',
            'DOMAIN_RESUMED', 'NODE_STOP_REQUESTED', 'BATCH_SEALED', 'BATCH_CANCELED', 'BATCH_REPAIRED'] END;
    END IF;
    _share := CASE WHEN cardinality(_keys) = 1 THEN search_audit.look_through
                   ELSE 2 * search_audit.look_through / cardinality(_keys) END;

    EXECUTE format(
        $query$
            WITH met AS MATERIALIZED (
                SELECT k.event_type AS key, m.*
                FROM unnest($1) AS k(event_type)
                CROSS JOIN LATERAL (
                    SELECT a.audit_id, a.ts, a.domain, a.event_type, a.details_json ->> 'operator' AS operator
                    FROM public.command_bus_audit a
                    WHERE %1$s AND %2$s
                    ORDER BY %3$s
                    LIMIT $4
                ) AS m
            ), reached AS (
                SELECT CASE WHEN $5 THEN min(e.last) ELSE max(e.first) END AS audit_id
                FROM (
                    SELECT min(m.audit_id) AS first, max(m.audit_id) AS last FROM met m GROUP BY m.key HAVING count(*) = $4
                ) AS e
            ), chosen AS (
                SELECT m.audit_id, m.ts
                FROM met m
                WHERE m.audit_id > $2 AND m.audit_id < $3
                  AND ((SELECT r.audit_id FROM reached r) IS NULL
                       OR CASE WHEN $5 THEN m.audit_id <= (SELECT r.audit_id FROM reached r)
                               ELSE m.audit_id >= (SELECT r.audit_id FROM reached r) END)
                  AND ($7 IS NULL OR m.operator = $7)
                  AND ($8 IS NULL OR m.domain = $8)
                  AND ($9 IS NULL OR m.event_type = $9)
                  AND ($10 IS NULL OR m.ts >= $10)
                  AND ($11 IS NULL OR m.ts <= $11)
                ORDER BY CASE WHEN $5 THEN m.audit_id ELSE -m.audit_id END
                LIMIT $12 + 1
            )
            SELECT coalesce(array_agg(c.audit_id ORDER BY CASE WHEN $5 THEN c.audit_id ELSE -c.audit_id END), '{}'),
                   min(c.ts), max(c.ts), (SELECT r.audit_id FROM reached r)
            FROM chosen c
        $query$,
        CASE WHEN search_audit.command_id IS NOT NULL THEN 'a.command_id >= $6 AND a.command_id <= $6'
             WHEN search_audit.batch_id IS NOT NULL THEN 'a.batch_id >= $6 AND a.batch_id <= $6'
             ELSE format('ROW(%1$s) > ROW(%2$s $2) AND ROW(%1$s) < ROW(%2$s $3)', _columns, _values) END,
        _condition,
        replace(_columns, ',', ' ' || _direction || ',') || ' ' || _direction)
    INTO matching, first_at, last_at, _reached
    USING _keys, _after, _before, _share, search_audit.oldest_first,
          coalesce(search_audit.command_id, search_audit.batch_id), search_audit.operator, search_audit.domain, search_audit.event_type, search_audit.since, search_audit.until, search_audit.at_most;

    IF cardinality(matching) > search_audit.at_most THEN
        matching := matching[:search_audit.at_most];
        more := true;
        next_beyond := matching[search_audit.at_most];
    ELSE
        more := _reached IS NOT NULL;
        next_beyond := _reached;
    END IF;
    IF coalesce(search_audit.command_id, search_audit.batch_id) IS NOT NULL THEN
        next_beyond := NULL;  -- what one command or batch has is read as a whole
    END IF;
    RETURN NEXT;
END;
$function$;
