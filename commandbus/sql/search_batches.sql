-- Batches by what is known of them, the newest first (or the oldest). As in commandbus.search, it reads a bounded amount:
-- of each domain (and status) the index gives its share of about `look_through` batches, and the other conditions choose
-- among these. `matching` has at most `at_most`, and those that were created at the same moment as the last of them.
-- Unless that is all there is, `more` is true, and `next_beyond` is where the next search goes on: a number of
-- microseconds since 1970.
--
-- Conditions that are null do not count. `among`: only these are looked at. The status is that of this moment: some may
-- have started and not be folded yet.
CREATE OR REPLACE FUNCTION commandbus.search_batches(
    domain text DEFAULT NULL,
    status text DEFAULT NULL,
    name_begins text DEFAULT NULL,
    created_from timestamptz DEFAULT NULL,
    created_until timestamptz DEFAULT NULL,
    beyond bigint DEFAULT NULL,
    oldest_first boolean DEFAULT false,
    at_most integer DEFAULT 1000,
    look_through integer DEFAULT 10000,
    among uuid[] DEFAULT NULL
)
RETURNS TABLE (matching uuid[], more boolean, next_beyond bigint)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_incremental_sort = off
AS $function$
DECLARE
    _beyond timestamptz := 'epoch'::timestamptz + search_batches.beyond * interval '1 microsecond';
    _from timestamptz := coalesce(search_batches.created_from, '-infinity');
    _until timestamptz := coalesce(search_batches.created_until, 'infinity');
    _statuses text[] := CASE search_batches.status WHEN 'IN_PROGRESS' THEN ARRAY['IN_PROGRESS', 'PENDING']
                                                   ELSE ARRAY[search_batches.status] END;
    _domains text[] := ARRAY(
        SELECT d.name FROM public.command_bus_domain d
        WHERE search_batches.domain IS NULL OR d.name = search_batches.domain ORDER BY d.name);
    _keys integer := cardinality(_domains) * cardinality(_statuses);
    _share integer := CASE WHEN _keys <= 1 THEN search_batches.look_through
                           ELSE greatest(2 * search_batches.look_through / _keys, 20) END;
    _times timestamptz[];
    _reached timestamptz;
    _last timestamptz;
BEGIN
    IF search_batches.oldest_first THEN
        _from := greatest(_from, _beyond + interval '1 microsecond');
    ELSE
        _until := least(_until, _beyond - interval '1 microsecond');
    END IF;
    EXECUTE format(
        $query$
            WITH met AS MATERIALIZED (
                SELECT k.ordinal, m.*
                FROM (SELECT d.name, s.name, row_number() OVER () FROM unnest($1) AS d(name), unnest($2) AS s(name)) AS
                     k(domain, status, ordinal)
                CROSS JOIN LATERAL (
                    SELECT b.batch_id, b.domain, b.status, b.name, b.created_at FROM public.command_bus_batch b
                    WHERE %1$s
                    ORDER BY b.created_at %2$s
                    FETCH FIRST $5 ROWS WITH TIES
                ) AS m
            ), reached AS (
                SELECT CASE WHEN $6 THEN min(e.last) ELSE max(e.first) END AS at
                FROM (
                    SELECT min(m.created_at) AS first, max(m.created_at) AS last FROM met m
                    GROUP BY m.ordinal HAVING count(*) >= $5 AND $7 IS NULL
                ) AS e
            ), chosen AS (
                SELECT m.batch_id, m.created_at
                FROM met m
                WHERE ((SELECT r.at FROM reached r) IS NULL
                       OR CASE WHEN $6 THEN m.created_at <= (SELECT r.at FROM reached r)
                               ELSE m.created_at >= (SELECT r.at FROM reached r) END)
                  AND m.domain = ANY ($1)
                  AND ($8 IS NULL OR starts_with(lower(m.name), lower($8)))
                  AND ($9 IS NULL OR $9 = CASE
                        WHEN m.status <> 'PENDING' OR $9 NOT IN ('PENDING', 'IN_PROGRESS') THEN m.status
                        WHEN EXISTS (SELECT FROM public.command_bus_batch_delta d
                                     WHERE d.batch_id = m.batch_id AND d.started_at IS NOT NULL) THEN 'IN_PROGRESS'
                        ELSE 'PENDING' END)
                ORDER BY m.created_at %2$s
                FETCH FIRST ($10 + 1) ROWS WITH TIES
            )
            SELECT coalesce(array_agg(c.batch_id ORDER BY c.created_at %2$s, c.batch_id %2$s), '{}'),
                   array_agg(c.created_at ORDER BY c.created_at %2$s), (SELECT r.at FROM reached r)
            FROM chosen c
        $query$,
        -- Those of known ids are looked up by these: what is said of them here is of use to no other index.
        CASE WHEN search_batches.among IS NOT NULL
             THEN 'b.batch_id = ANY ($7) AND b.domain IS NOT DISTINCT FROM k.domain'
                  ' AND (b.created_at BETWEEN $3 AND $4) IS TRUE'
             ELSE 'b.domain = k.domain AND b.created_at BETWEEN $3 AND $4'
                  || CASE WHEN search_batches.status IS NULL THEN '' ELSE ' AND b.status = k.status' END END,
        CASE WHEN search_batches.oldest_first THEN 'ASC' ELSE 'DESC' END)
    INTO matching, _times, _reached
    USING _domains, CASE WHEN search_batches.among IS NULL THEN _statuses ELSE ARRAY['any'] END, _from, _until, _share,
          search_batches.oldest_first, search_batches.among, search_batches.name_begins, search_batches.status,
          search_batches.at_most;

    IF cardinality(matching) > search_batches.at_most THEN
        _last := _times[search_batches.at_most];
        more := true;
        IF _times[search_batches.at_most + 1] <> _last THEN
            matching := matching[:search_batches.at_most];
        END IF;
    ELSE
        _last := _reached;
        more := _reached IS NOT NULL;
    END IF;
    next_beyond := (extract(epoch FROM _last) * 1000000)::bigint;
    RETURN NEXT;
END;
$function$;

-- The batches whose id lies between two, those with the highest ids. `more` says that there are others.
CREATE OR REPLACE FUNCTION commandbus.search_batch_ids(first uuid, last uuid, at_most integer DEFAULT 1000)
RETURNS TABLE (matching uuid[], more boolean)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    SELECT coalesce((array_agg(k.batch_id))[:search_batch_ids.at_most], '{}'), count(*) > search_batch_ids.at_most
    FROM (
        SELECT b.batch_id FROM public.command_bus_batch b
        WHERE b.batch_id >= search_batch_ids.first AND b.batch_id <= search_batch_ids.last
        ORDER BY b.batch_id DESC
        LIMIT search_batch_ids.at_most + 1
    ) AS k
$function$;
