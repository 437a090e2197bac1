-- Leases up to `qty` ready commands to a node for `vt` seconds and counts the attempt. The lease's token is
-- (msg_id, read_ct); whoever finishes, fails, extends or releases the command must show it.
--
-- Receiving starts at the queue, while everyone else locks commands first. So it never waits for a command row: a locked
-- one is skipped, keeps the token it had, and is not delivered.
--
-- A delivery that ended without a word (the row still has a token) was no attempt. What is done about it depends on what
-- is known of its node (judge_lease).
--
-- With `floor` only messages from that msg_id on are looked at, in their order. Those of the types in `leave` (of
-- replies: of the domains) are for others. See read_ready.
CREATE OR REPLACE FUNCTION commandbus.receive(
    domain text,
    qty integer,
    vt integer,
    node_id uuid DEFAULT NULL,
    floor bigint DEFAULT NULL,
    leave text[] DEFAULT NULL
)
RETURNS TABLE (
    command_id uuid,
    command_type text,
    correlation_id uuid,
    reply_to text,
    created_at timestamptz,
    data jsonb,
    msg_id bigint,
    read_ct integer,
    attempt integer,
    max_attempts integer,
    lease_expires_at timestamptz,
    row_id bigint,
    batch_id uuid
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
#variable_conflict use_column
DECLARE
    _domain public.command_bus_domain;
    _now timestamptz := clock_timestamp();
    _until timestamptz := _now + make_interval(secs => receive.vt);
    _msg_ids bigint[];
    _read_cts integer[];
    _messages jsonb[];
    _ids uuid[];
    _leased integer;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(receive.domain);
    IF _domain.paused THEN
        RETURN;
    END IF;

    SELECT array_agg(m.msg_id), array_agg(m.read_ct), array_agg(m.message)
    INTO _msg_ids, _read_cts, _messages
    FROM commandbus.read_ready(
        _domain.queue_name, receive.qty, _now, _until, receive.floor, receive.leave,
        CASE WHEN _domain.replies THEN 'domain' ELSE 'type' END) AS m;
    IF _msg_ids IS NULL THEN
        RETURN;
    END IF;
    _ids := commandbus.command_ids_of(_messages);
    IF _domain.replies THEN
        PERFORM commandbus.adopt_replies(_domain, _ids, _msg_ids, _messages, _now);
    END IF;

    RETURN QUERY
    WITH free AS MATERIALIZED (
        SELECT k.id, m.read_ct, m.message
        FROM unnest(_ids, _msg_ids, _read_cts, _messages) AS m(command_id, msg_id, read_ct, message)
        CROSS JOIN LATERAL (
            SELECT c.id FROM public.command_bus_command c
            WHERE c.domain = receive.domain AND c.command_id BETWEEN m.command_id AND m.command_id  -- as in rows_of
              AND c.msg_id = m.msg_id
              AND c.status IN ('PENDING', 'IN_PROGRESS')
              AND NOT c.suspect
              AND (c.lease_read_ct IS NULL
                   OR commandbus.judge_lease(c.node_id, c.lease_expires_at, receive.node_id) = 'AGAIN')
            ORDER BY c.command_id
            LIMIT 1
            FOR UPDATE SKIP LOCKED
        ) AS k
    ), leased AS (
        UPDATE public.command_bus_command c
        SET attempts = c.attempts + CASE WHEN c.lease_read_ct IS NULL THEN 1 ELSE 0 END,
            status = CASE WHEN _domain.mark_in_progress THEN 'IN_PROGRESS' ELSE c.status END,
            lease_read_ct = f.read_ct,
            lease_expires_at = _until,
            node_id = receive.node_id,
            updated_at = _now
        FROM free f
        WHERE c.id = ANY (ARRAY[f.id])
        RETURNING c.*, f.message
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT l.domain, l.command_id, l.batch_id, 'RECEIVED', _now,
               jsonb_build_object('attempt', l.attempts, 'msg_id', l.msg_id, 'node_id', receive.node_id)
        FROM leased l
    ), begun AS (
        -- Only until the batch is known to have started: its row is read here, and never locked.
        INSERT INTO public.command_bus_batch_delta (batch_id, started_at, at)
        SELECT w.batch_id, _now, _now
        FROM (SELECT DISTINCT l.batch_id FROM leased l WHERE l.batch_id IS NOT NULL) AS w
        CROSS JOIN LATERAL (
            SELECT FROM public.command_bus_batch b WHERE b.batch_id = w.batch_id AND b.started_at IS NULL LIMIT 1
        ) AS b
    )
    SELECT l.command_id, l.command_type, l.correlation_id, l.reply_queue, l.created_at,
           CASE WHEN _domain.replies THEN l.message ELSE l.message -> 'data' END,
           l.msg_id, l.lease_read_ct, l.attempts, l.max_attempts, l.lease_expires_at, l.id, l.batch_id
    FROM leased l
    ORDER BY l.msg_id;

    GET DIAGNOSTICS _leased = ROW_COUNT;
    IF _leased < cardinality(_msg_ids) THEN
        PERFORM commandbus.set_aside(receive.domain, _ids, _msg_ids, _read_cts, receive.node_id);
    END IF;
END;
$function$;

-- Takes up to `qty` ready messages of a queue: hides each until `until` and counts the read.
--
-- PGMQ's own read walks along msg_id and passes every delayed message on its way. This one walks along the index on vt
-- and meets only what is ready. Beside a snapshot that is held for long, it meets in addition every entry that was taken
-- since; a reader that has seen this passes the `floor` it has reached and walks along msg_id from there. What becomes
-- ready below the floor is found by the next read without one.
--
-- Messages with a value of `leave` under `leave_by` are passed over and stay as they are.
--
-- The name of the table is not known before, so the statement is prepared by hand, once for a session: to plan it takes
-- as long as to run it. (Why it looks a message up by ANY, see rows_of: a queue that was analyzed when it was empty.)
CREATE OR REPLACE FUNCTION commandbus.read_ready(
    queue text, qty integer, now timestamptz, until timestamptz, floor bigint, leave text[], leave_by text
)
RETURNS TABLE (msg_id bigint, read_ct integer, message jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET datestyle = ISO
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    _leaves boolean := cardinality(read_ready.leave) > 0;
    _statement text := format(
        'commandbus 2%s%s %s',  -- at most 63 bytes; another number when the statement changes
        CASE WHEN _leaves THEN 'l' END, CASE WHEN read_ready.floor IS NOT NULL THEN 'f' END, read_ready.queue);
    _query text := $query$
        PREPARE %4$I (timestamptz, integer, timestamptz, bigint, text[], text) AS
        WITH ready AS MATERIALIZED (
            SELECT r.msg_id FROM pgmq.%1$I r WHERE r.vt <= $1 %2$s %3$s LIMIT $2 FOR UPDATE SKIP LOCKED
        )
        UPDATE pgmq.%1$I q
        SET vt = $3, read_ct = q.read_ct + 1
        FROM ready
        WHERE q.msg_id = ANY (ARRAY[ready.msg_id])
        RETURNING q.msg_id, q.read_ct, q.message
    $query$;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_prepared_statements AS p WHERE p.name = _statement) THEN
        EXECUTE format(
            _query,
            'q_' || read_ready.queue,
            CASE WHEN _leaves THEN $$AND coalesce(r.message ->> $6, '') <> ALL ($5)$$ END,
            CASE WHEN read_ready.floor IS NULL THEN 'ORDER BY r.vt' ELSE 'AND r.msg_id >= $4 ORDER BY r.msg_id' END,
            _statement);
    END IF;
    RETURN QUERY EXECUTE format(
        'EXECUTE %I (%L, %L, %L, %L, %L, %L)',
        _statement, read_ready.now, read_ready.qty, read_ready.until, read_ready.floor, read_ready.leave, read_ready.leave_by);
END;
$function$;

-- The commands that messages belong to. That each says so is seldom in doubt, and asking takes longer than trying.
CREATE OR REPLACE FUNCTION commandbus.command_ids_of(messages jsonb[])
RETURNS uuid[]
LANGUAGE plpgsql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN ARRAY(
        SELECT CASE WHEN m ? 'outcome' THEN md5((m ->> 'domain') || '/' || (m ->> 'command_id')::uuid)::uuid
                    ELSE (m ->> 'command_id')::uuid END
        FROM unnest(command_ids_of.messages) AS m
    );
EXCEPTION WHEN invalid_text_representation THEN
    RETURN ARRAY(SELECT commandbus.command_id_of(m) FROM unnest(command_ids_of.messages) AS m);
END;
$function$;

-- The command that a message belongs to; null if it does not say so. A reply belongs to the command that stands for its
-- handling, whose id is made of the domain and the id of the command that it answers. No SET clause, so that PostgreSQL
-- can inline it.
CREATE OR REPLACE FUNCTION commandbus.command_id_of(message jsonb)
RETURNS uuid
LANGUAGE sql
IMMUTABLE
AS $function$
    SELECT CASE
        WHEN ((message OPERATOR(pg_catalog.->>) 'command_id')
              OPERATOR(pg_catalog.~*) '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$') IS NOT TRUE
        THEN NULL
        WHEN message OPERATOR(pg_catalog.?) 'outcome'
        THEN pg_catalog.md5((message OPERATOR(pg_catalog.->>) 'domain') OPERATOR(pg_catalog.||) '/' OPERATOR(pg_catalog.||)
                            pg_catalog.lower(message OPERATOR(pg_catalog.->>) 'command_id'))::pg_catalog.uuid
        ELSE (message OPERATOR(pg_catalog.->>) 'command_id')::pg_catalog.uuid
    END
$function$;

-- Makes a command of every reply that has none yet: from then on its handling is leased, retried, audited and looked
-- after like any other. Its type begins with the domain that has replied. Nobody is sent a reply to a reply. As in send,
-- a tombstone can be trusted only after the insert, which may have waited for the prune.
CREATE OR REPLACE FUNCTION commandbus.adopt_replies(
    domain public.command_bus_domain, ids uuid[], msg_ids bigint[], messages jsonb[], now timestamptz
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
    INSERT INTO public.command_bus_command (
        domain, queue_name, msg_id, command_id, command_type, status, max_attempts,
        created_at, updated_at, reply_queue, correlation_id, content_hash, unique_globally
    )
    SELECT (domain).name, (domain).queue_name, m.msg_id, m.id, (m.message ->> 'domain') || '/' || (m.message ->> 'type'),
           'PENDING', (domain).max_attempts,
           now, now, NULL, (m.message ->> 'correlation_id')::uuid,
           sha256(convert_to(m.message::text, 'UTF8')), false
    FROM unnest(ids, msg_ids, messages) AS m(id, msg_id, message)
    WHERE m.id IS NOT NULL
      AND m.message ->> 'outcome' IN ('SUCCESS', 'FAILED', 'CANCELED')
      AND jsonb_typeof(m.message -> 'domain') = 'string' AND length(m.message ->> 'domain') <= 47
      AND jsonb_typeof(m.message -> 'type') = 'string' AND length(m.message ->> 'type') BETWEEN 1 AND 263
      AND m.message ->> 'correlation_id' ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    ORDER BY m.id
    ON CONFLICT DO NOTHING;

    DELETE FROM public.command_bus_command c
    WHERE c.id = ANY (commandbus.rows_of((adopt_replies.domain).name, ARRAY(
        SELECT m.id
        FROM unnest(ids) AS m(id)
        CROSS JOIN LATERAL (
            SELECT FROM public.command_bus_tombstone t
            WHERE t.domain = (adopt_replies.domain).name AND t.command_id = m.id
            LIMIT 1
        ) AS t
    )));
$function$;

-- Cares for the messages of one read that were not leased. Those without a command are archived and recorded; those
-- whose command is resolved, pruned, in the Troubleshooting Queue, or has a newer message are archived; those of
-- suspects wait for an isolated run; the rest belong to commands that somebody is changing at this moment, or whose lease
-- may still be extended, and come back in a second.
CREATE OR REPLACE FUNCTION commandbus.set_aside(
    domain text, command_ids uuid[], msg_ids bigint[], read_cts integer[], node_id uuid
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    _queue text := commandbus.queue_of(set_aside.domain);
    _rows bigint[] := commandbus.rows_of(set_aside.domain, set_aside.command_ids);
    _unreadable bigint[];
    _stale bigint[];
    _suspects uuid[];
    _locked bigint[];
BEGIN
    SELECT array_agg(m.msg_id) FILTER (WHERE c.id IS NULL AND t.command_id IS NULL),
           array_agg(m.msg_id) FILTER (
               WHERE t.command_id IS NOT NULL OR c.status NOT IN ('PENDING', 'IN_PROGRESS') OR c.msg_id <> m.msg_id),
           array_agg(m.command_id) FILTER (
               WHERE c.status IN ('PENDING', 'IN_PROGRESS') AND c.msg_id = m.msg_id
                 AND c.lease_read_ct IS DISTINCT FROM m.read_ct)
    INTO _unreadable, _stale, _suspects
    FROM unnest(_rows, set_aside.command_ids, set_aside.msg_ids, set_aside.read_cts)
        AS m(id, command_id, msg_id, read_ct)
    LEFT JOIN public.command_bus_command c ON c.id = ANY (ARRAY[m.id])
    LEFT JOIN LATERAL (
        SELECT t.command_id FROM public.command_bus_tombstone t
        WHERE t.domain = set_aside.domain AND t.command_id = m.command_id
        LIMIT 1
    ) AS t ON true;

    IF _unreadable IS NOT NULL THEN
        INSERT INTO public.command_bus_unreadable_message (domain, queue_name, msg_id, reason, seen_at)
        SELECT set_aside.domain, _queue, m.msg_id,
               CASE WHEN m.command_id IS NULL THEN 'the message has no command_id that is a UUID'
                    ELSE format('there is no command %s in domain %s', m.command_id, set_aside.domain) END,
               clock_timestamp()
        FROM unnest(set_aside.command_ids, set_aside.msg_ids) AS m(command_id, msg_id)
        WHERE m.msg_id = ANY (_unreadable)
        ORDER BY m.msg_id;
    END IF;
    IF _unreadable IS NOT NULL OR _stale IS NOT NULL THEN
        PERFORM pgmq.archive(_queue, coalesce(_unreadable, '{}') || coalesce(_stale, '{}'));
    END IF;
    IF _suspects IS NOT NULL THEN
        _locked := ARRAY(
            SELECT m.msg_id FROM unnest(set_aside.command_ids, set_aside.msg_ids) AS m(command_id, msg_id)
            WHERE m.command_id = ANY (_suspects)
              AND m.command_id NOT IN (SELECT a FROM commandbus.accuse(set_aside.domain, _suspects, set_aside.node_id) AS a)
        );
        IF cardinality(_locked) > 0 THEN
            PERFORM pgmq.set_vt(_queue, _locked, clock_timestamp() + interval '1 second');
        END IF;
    END IF;
END;
$function$;
