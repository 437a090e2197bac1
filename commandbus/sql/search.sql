-- Commands by what is known of them, the newest first (or the oldest). Reads a bounded amount however many there are:
-- one condition chooses the index, that gives at most about `look_through` commands, and the other conditions choose
-- among these. `matching` has the rows of at most `at_most`. Unless that is all there is, `more` is true, and
-- `next_beyond` is where the next search goes on. It is null if that cannot be said: of many commands that wait or run.
--
-- Conditions that are null do not count. `among`: only these rows are looked at. `either_id` is a command's id or its
-- correlation id. An error type or code '' asks for commands without one. `running` asks for leased commands, whatever their status shows.
CREATE OR REPLACE FUNCTION commandbus.search(
    domains text[] DEFAULT NULL,
    command_types text[] DEFAULT NULL,
    status text DEFAULT NULL,
    running boolean DEFAULT false,
    either_id uuid DEFAULT NULL,
    batch_id uuid DEFAULT NULL,
    error_types text[] DEFAULT NULL,
    error_codes text[] DEFAULT NULL,
    least_attempts integer DEFAULT NULL,
    node_ids uuid[] DEFAULT NULL,
    created_from timestamptz DEFAULT NULL,
    created_until timestamptz DEFAULT NULL,
    updated_from timestamptz DEFAULT NULL,
    updated_until timestamptz DEFAULT NULL,
    beyond bigint DEFAULT NULL,
    oldest_first boolean DEFAULT false,
    at_most integer DEFAULT 1000,
    look_through integer DEFAULT 10000,
    among bigint[] DEFAULT NULL
)
RETURNS TABLE (matching bigint[], more boolean, next_beyond bigint)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
#variable_conflict use_column
DECLARE
    _domains text[] := ARRAY(
        SELECT d.name FROM public.command_bus_domain d
        WHERE search.domains IS NULL OR d.name = ANY (search.domains) ORDER BY d.name);
    _after bigint := 0;
    _before bigint := 9223372036854775807;
    _types record;
    _errors text[];
    _window record;
BEGIN
    IF search.created_from IS NOT NULL THEN
        _after := commandbus.first_at('command', search.created_from - interval '2 seconds') - 1;
    END IF;
    IF least(search.created_until, search.updated_until) IS NOT NULL THEN  -- nothing is changed before it is sent
        _before := commandbus.first_at('command', least(search.created_until, search.updated_until) + interval '2 seconds');
    END IF;
    IF search.oldest_first THEN
        _after := greatest(_after, search.beyond);
    ELSE
        _before := least(_before, search.beyond);
    END IF;

    IF search.among IS NOT NULL THEN
        SELECT search.among AS rows, false AS is_cut, NULL::bigint AS reached INTO _window;
    ELSIF search.either_id IS NOT NULL THEN
        _window := commandbus.search_window(
            'correlation', ARRAY[search.either_id::text], NULL, NULL, _after, _before, search.oldest_first,
            search.look_through);
        -- The command with this id belongs to them too. It often starts the chain, and then stands in no index of it.
        _window.rows := _window.rows || ARRAY(
            SELECT r.id FROM unnest(_domains) AS d(name), unnest(commandbus.rows_of(d.name, ARRAY[search.either_id])) AS r(id)
            WHERE r.id > coalesce(_window.reached, _after) AND r.id < _before AND NOT search.oldest_first
               OR r.id > _after AND r.id < coalesce(_window.reached, _before) AND search.oldest_first);
    ELSIF search.batch_id IS NOT NULL THEN
        -- What waits or runs may be anywhere in a large batch, and is soon found in the queue, if that is short.
        SELECT NULL::bigint[] AS rows, true AS is_cut, NULL::bigint AS reached INTO _window;
        IF search.running OR search.status IN ('PENDING', 'IN_PROGRESS') THEN
            _window := commandbus.search_live(
                _domains, search.running OR search.status = 'IN_PROGRESS', search.oldest_first, 2000);
        END IF;
        IF _window.is_cut THEN
            _window := commandbus.search_window(
                CASE WHEN search.status IN ('FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE') THEN 'batch status'
                     ELSE 'batch' END,
                ARRAY[search.batch_id::text], NULL, search.status, _after, _before, search.oldest_first,
                search.look_through);
        END IF;
    ELSIF NOT '' = ANY (search.error_codes) THEN
        _window := commandbus.search_window(
            'error code', search.error_codes, NULL, NULL, _after, _before, search.oldest_first, search.look_through);
    ELSIF NOT '' = ANY (search.error_types) THEN
        _window := commandbus.search_window(
            'error type', search.error_types, NULL, NULL, _after, _before, search.oldest_first, search.look_through);
    ELSIF search.running OR search.status IN ('PENDING', 'IN_PROGRESS') THEN
        _window := commandbus.search_live(
            _domains, search.running OR search.status = 'IN_PROGRESS', search.oldest_first, 2000);
    ELSIF search.least_attempts > 1 THEN
        -- Who needs a second attempt has failed in the first.
        _errors := commandbus.error_values('type');
        _window := commandbus.search_window(
            CASE WHEN cardinality(_errors) > 200 THEN 'any' ELSE 'error type' END, _errors, NULL, NULL, _after, _before,
            search.oldest_first, search.look_through);
    ELSIF search.status IN ('FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE') OR search.domains IS NOT NULL
          OR search.command_types IS NOT NULL THEN
        SELECT array_agg(t.domain) AS domains, array_agg(t.command_type) AS command_types
        INTO _types
        FROM (
            SELECT t.domain, t.command_type FROM commandbus.types_of(_domains) AS t WHERE search.command_types IS NULL
            UNION ALL
            SELECT d, t FROM unnest(_domains) AS d, unnest(search.command_types) AS t
        ) AS t;
        -- A domain with very many types has none that is worth an index.
        _window := commandbus.search_window(
            CASE WHEN cardinality(_types.domains) > 1000 THEN 'any'
                 WHEN search.status IN ('FAILED', 'CANCELED', 'IN_TROUBLESHOOTING_QUEUE') THEN 'status' ELSE 'type' END,
            _types.domains, _types.command_types, search.status, _after, _before, search.oldest_first,
            search.look_through);
    ELSE
        _window := commandbus.search_window(
            'any', NULL, NULL, NULL, _after, _before, search.oldest_first, search.look_through);
    END IF;

    matching := ARRAY(
        SELECT c.id
        FROM (SELECT r.id FROM unnest(_window.rows) AS r(id)
              ORDER BY CASE WHEN search.oldest_first THEN r.id ELSE -r.id END) AS w
        CROSS JOIN LATERAL (
            SELECT c.* FROM public.command_bus_command c WHERE c.id = w.id OFFSET 0  -- one after the other, until enough match
        ) AS c
        WHERE c.domain = ANY (_domains)
          AND c.id > _after AND c.id < _before
          AND (search.command_types IS NULL OR c.command_type = ANY (search.command_types))
          AND (search.status IS NULL OR c.status = search.status)
          AND (NOT search.running OR c.lease_read_ct IS NOT NULL)
          AND (search.either_id IS NULL OR search.either_id IN (c.correlation_id, c.command_id))
          AND (search.batch_id IS NULL OR c.batch_id = search.batch_id)
          AND (search.error_types IS NULL OR coalesce(c.last_error_type, '') = ANY (search.error_types))
          AND (search.error_codes IS NULL OR coalesce(c.last_error_code, '') = ANY (search.error_codes))
          AND (search.least_attempts IS NULL OR c.attempts >= search.least_attempts)
          AND (search.node_ids IS NULL OR c.node_id = ANY (search.node_ids))
          AND (search.created_from IS NULL OR c.created_at >= search.created_from)
          AND (search.created_until IS NULL OR c.created_at <= search.created_until)
          AND (search.updated_from IS NULL OR c.updated_at >= search.updated_from)
          AND (search.updated_until IS NULL OR c.updated_at <= search.updated_until)
        LIMIT search.at_most + 1
    );
    IF cardinality(matching) > search.at_most THEN
        matching := matching[:search.at_most];
        more := true;
        next_beyond := matching[search.at_most];
    ELSE
        more := _window.is_cut;
        next_beyond := _window.reached;
    END IF;
    RETURN NEXT;
END;
$function$;

-- What one index has, newest (or oldest) first, between two rows. With several keys each gives its share, and only so
-- much counts as all of them have reached: `reached`, if there is more beyond it.
CREATE OR REPLACE FUNCTION commandbus.search_window(
    by text,
    keys text[],
    second_keys text[],
    status text,
    after bigint,
    before bigint,
    oldest_first boolean,
    look_through integer,
    OUT rows bigint[],
    OUT is_cut boolean,
    OUT reached bigint
)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_incremental_sort = off
AS $function$
DECLARE
    -- Comparing all columns of an index as a row, in its order, leaves no other index to choose.
    _columns text := CASE search_window.by
        WHEN 'correlation' THEN 'c.correlation_id, c.id'
        WHEN 'batch' THEN 'c.batch_id, c.id'
        WHEN 'batch status' THEN 'c.batch_id, c.rare_status, c.id'
        WHEN 'error code' THEN 'c.last_error_code, c.id'
        WHEN 'error type' THEN 'c.last_error_type, c.id'
        WHEN 'status' THEN 'c.rare_status, c.domain, c.command_type, c.id'
        WHEN 'type' THEN 'c.domain, c.command_type, c.id'
        ELSE 'c.id' END;
    _values text := CASE search_window.by
        WHEN 'correlation' THEN 'k.first::uuid, '
        WHEN 'batch' THEN 'k.first::uuid, '
        WHEN 'batch status' THEN 'k.first::uuid, $7, '
        WHEN 'status' THEN '$7, k.first, k.second, '
        WHEN 'type' THEN 'k.first, k.second, '
        WHEN 'any' THEN ''
        ELSE 'k.first, ' END;
    _condition text := CASE search_window.by
        WHEN 'correlation' THEN 'c.correlation_id <> c.command_id'
        WHEN 'batch' THEN 'c.batch_id IS NOT NULL'
        WHEN 'batch status' THEN 'c.batch_id IS NOT NULL AND c.rare_status IS NOT NULL'
        WHEN 'error code' THEN 'c.last_error_code IS NOT NULL'
        WHEN 'error type' THEN 'c.last_error_type IS NOT NULL'
        WHEN 'status' THEN 'c.rare_status IS NOT NULL'
        WHEN 'type' THEN $$c.domain >= ''$$
        ELSE 'true' END;
    _direction text := CASE WHEN search_window.oldest_first THEN 'ASC' ELSE 'DESC' END;
    _keys integer := CASE search_window.by WHEN 'any' THEN 1 ELSE coalesce(cardinality(search_window.keys), 0) END;
    _share integer := CASE WHEN _keys <= 1 THEN search_window.look_through
                           ELSE greatest(2 * search_window.look_through / _keys, 20) END;
BEGIN
    EXECUTE format(
        $query$
            WITH met AS MATERIALIZED (
                SELECT k.ordinal, m.id
                FROM unnest($1, $2) WITH ORDINALITY AS k(first, second, ordinal)
                CROSS JOIN LATERAL (
                    SELECT c.id FROM public.command_bus_command c
                    WHERE ROW(%1$s) > ROW(%2$s $3) AND ROW(%1$s) < ROW(%2$s $4) AND %3$s
                    ORDER BY %4$s
                    LIMIT $5
                ) AS m
            ), reached AS (
                SELECT CASE WHEN $6 THEN min(e.last) ELSE max(e.first) END AS id
                FROM (
                    SELECT min(m.id) AS first, max(m.id) AS last FROM met m GROUP BY m.ordinal HAVING count(*) = $5
                ) AS e
            )
            SELECT coalesce(array_agg(m.id), '{}'), (SELECT r.id FROM reached r)
            FROM met m
            WHERE (SELECT r.id FROM reached r) IS NULL
               OR CASE WHEN $6 THEN m.id <= (SELECT r.id FROM reached r) ELSE m.id >= (SELECT r.id FROM reached r) END
        $query$,
        _columns, _values, _condition, replace(_columns, ',', ' ' || _direction || ',') || ' ' || _direction)
    INTO rows, reached
    USING CASE search_window.by WHEN 'any' THEN ARRAY['any'] ELSE search_window.keys END,
          CASE WHEN search_window.by <> 'any' THEN search_window.second_keys END, search_window.after,
          search_window.before, _share, search_window.oldest_first, search_window.status;
    is_cut := reached IS NOT NULL;
END;
$function$;

-- The commands that wait or run: what has a message in one of the queues, the newest of it (or the oldest). With `leased`,
-- what a worker may hold: what is hidden, and what has come back when its lease ran out. (No index can say it: an index on
-- the status would have to be written at every change of it.)
CREATE OR REPLACE FUNCTION commandbus.search_live(
    domains text[], leased boolean, oldest_first boolean, at_most integer,
    OUT rows bigint[], OUT is_cut boolean, OUT reached bigint
)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_incremental_sort = off
AS $function$
DECLARE
    _domain text;
    _queue text;
    _ids uuid[];
    _met integer;
BEGIN
    rows := '{}';
    is_cut := false;
    FOREACH _domain IN ARRAY search_live.domains LOOP
        _queue := 'q_' || commandbus.queue_of(_domain);
        CONTINUE WHEN to_regclass(format('pgmq.%I', _queue)) IS NULL;
        EXECUTE format(
            CASE WHEN search_live.leased THEN
                $query$
                    SELECT array_agg(commandbus.command_id_of(m.message)) FILTER (WHERE m.read_ct > 0),
                           greatest(count(*) FILTER (WHERE m.is_hidden), count(*) FILTER (WHERE NOT m.is_hidden))
                    FROM (
                        (SELECT q.message, q.read_ct, true AS is_hidden
                         FROM pgmq.%1$I q WHERE q.vt > $2 ORDER BY q.vt LIMIT $1)
                        UNION ALL
                        (SELECT q.message, q.read_ct, false FROM pgmq.%1$I q WHERE q.vt <= $2 ORDER BY q.vt LIMIT $1)
                    ) AS m
                $query$
            ELSE
                $query$
                    SELECT array_agg(commandbus.command_id_of(m.message)), count(*)
                    FROM (SELECT q.message FROM pgmq.%1$I q ORDER BY q.msg_id %2$s LIMIT $1) AS m
                $query$
            END,
            _queue, CASE WHEN search_live.oldest_first THEN 'ASC' ELSE 'DESC' END)
        INTO _ids, _met
        USING search_live.at_most, clock_timestamp();
        is_cut := is_cut OR _met >= search_live.at_most;
        rows := rows || array_remove(commandbus.rows_of(_domain, coalesce(_ids, '{}')), NULL);
    END LOOP;
END;
$function$;

-- The commands whose id lies between two, of the domains together those with the highest ids. (An id of version 7 begins
-- with its time.) `more` says that there are others.
CREATE OR REPLACE FUNCTION commandbus.search_ids(
    first uuid, last uuid, domains text[] DEFAULT NULL, at_most integer DEFAULT 1000
)
RETURNS TABLE (matching bigint[], more boolean)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    SELECT coalesce((array_agg(k.id ORDER BY k.command_id DESC))[:search_ids.at_most], '{}'), count(*) > search_ids.at_most
    FROM public.command_bus_domain d
    CROSS JOIN LATERAL (
        SELECT c.id, c.command_id FROM public.command_bus_command c
        WHERE ROW(c.domain, c.command_id) >= ROW(d.name, search_ids.first)
          AND ROW(c.domain, c.command_id) <= ROW(d.name, search_ids.last)
        ORDER BY c.domain DESC, c.command_id DESC
        LIMIT search_ids.at_most + 1
    ) AS k
    WHERE search_ids.domains IS NULL OR d.name = ANY (search_ids.domains)
$function$;

-- The number of the first row that was written at a moment or later; that after the last, if none was. `of`: 'command' or
-- 'audit'. Rows are numbered in the order of writing, but for writers who wait for each other.
CREATE OR REPLACE FUNCTION commandbus.first_at(of text, moment timestamptz)
RETURNS bigint
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    _table text := CASE first_at.of
        WHEN 'audit' THEN '(SELECT a.audit_id AS id, a.ts AS at FROM public.command_bus_audit a)'
        ELSE '(SELECT c.id, c.created_at AS at FROM public.command_bus_command c)' END;
    _first bigint;
    _last bigint;
    _middle bigint;
    _id bigint;
    _at timestamptz;
BEGIN
    EXECUTE format('SELECT min(r.id), max(r.id) + 1 FROM %s AS r', _table) INTO _first, _last;
    WHILE _first < _last LOOP
        _middle := (_first + _last) / 2;
        EXECUTE format('SELECT r.id, r.at FROM %s AS r WHERE r.id >= $1 ORDER BY r.id LIMIT 1', _table)
        INTO _id, _at
        USING _middle;
        IF _id IS NULL OR _at >= first_at.moment THEN
            _last := _middle;
        ELSE
            _first := _id + 1;
        END IF;
    END LOOP;
    RETURN coalesce(_first, 1);
END;
$function$;

-- The types of the commands that domains have, met by jumping from one to the next. At most `at_most` and one.
CREATE OR REPLACE FUNCTION commandbus.types_of(domains text[], at_most integer DEFAULT 1000)
RETURNS TABLE (domain text, command_type text)
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_incremental_sort = off
AS $function$
#variable_conflict use_column
DECLARE
    _type text;
    _types integer := 0;
BEGIN
    FOREACH domain IN ARRAY types_of.domains LOOP
        _type := '';
        LOOP
            SELECT c.command_type INTO _type
            FROM public.command_bus_command c
            WHERE ROW(c.domain, c.command_type) > ROW(types_of.domain, _type)
              AND ROW(c.domain) <= ROW(types_of.domain)
              AND c.domain >= ''  -- the condition of the index
            ORDER BY c.domain, c.command_type
            LIMIT 1;
            EXIT WHEN NOT FOUND;
            command_type := _type;
            RETURN NEXT;
            _types := _types + 1;
            IF _types > types_of.at_most THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
END;
$function$;

-- The types or the codes of the errors that commands have, met by jumping from one to the next. At most `at_most` and one.
CREATE OR REPLACE FUNCTION commandbus.error_values(what text, at_most integer DEFAULT 200)
RETURNS text[]
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_incremental_sort = off
AS $function$
DECLARE
    _values text[] := '{}';
    _value text := '';
BEGIN
    FOR _ IN 0..error_values.at_most LOOP
        IF error_values.what = 'code' THEN
            SELECT c.last_error_code INTO _value FROM public.command_bus_command c
            WHERE c.last_error_code > _value ORDER BY c.last_error_code LIMIT 1;
        ELSE
            SELECT c.last_error_type INTO _value FROM public.command_bus_command c
            WHERE c.last_error_type > _value ORDER BY c.last_error_type LIMIT 1;
        END IF;
        EXIT WHEN NOT FOUND;
        _values := _values || _value;
    END LOOP;
    RETURN _values;
END;
$function$;
