-- Sends commands in the caller's transaction. Answers one row per command id:
--   SENT       it is new
--   DUPLICATE  it was sent before with the same type and data; nothing was done
--   CONFLICT   it was sent before with another type or other data
--   TOO_LARGE  its data takes more bytes than the domain allows
-- After one of the last two, nothing of the whole call was written. None of them breaks the caller's transaction.
--
-- The messages go out before the rows, so that each row is written once, with its message's id. A message whose row
-- then meets a twin is taken back before anyone could see it. So are the message and the row of a command
-- that was pruned: its tombstone can be trusted only after the insert, which may have waited for the prune.
--
-- `wake`: an idle worker shall be woken by the commit. For calls that are a transaction of their own: nobody else can
-- wake that worker until then. Others call commandbus.wake after their commit.
--
-- `batch_id`: the commands become part of this batch, which must be open. Here errors do break the transaction: if there
-- is no such batch, if it is sealed, or if a command was sent before as part of another, or of none.
CREATE OR REPLACE FUNCTION commandbus.send(
    domain text,
    command_ids uuid[],
    command_types text[],
    data jsonb[],
    reply_to text[] DEFAULT NULL,
    correlation_ids uuid[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL,
    max_attempts integer[] DEFAULT NULL,
    wake boolean DEFAULT false,
    batch_id uuid DEFAULT NULL
)
RETURNS TABLE (command_id uuid, outcome text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while a table was young is kept while it grows. So each statement here can reach its rows by key
-- only: a plain join could begin at the table, LATERAL with LIMIT cannot; and where another index begins with the domain
-- too, an ORDER BY that does not follow from an equality leaves only the one that has this order.
SET enable_seqscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
#variable_conflict use_column
DECLARE
    _domain public.command_bus_domain;
    _queue text;
    _now timestamptz := clock_timestamp();
    _bad record;
    _too_large uuid[];
    _conflicts uuid[];
    _ids uuid[];
    _types text[];
    _data jsonb[];
    _hashes bytea[];
    _step integer := greatest(1, cardinality(send.command_ids) / 10);
    _all_right boolean;
    _all_new boolean;
    _reply_to text[];
    _correlation_ids uuid[];
    _delays double precision[];
    _max_attempts integer[];
    _delay double precision;
    _messages jsonb[];
    _msg_ids bigint[];
    _sent uuid[];
    _rows bigint[];
    _times timestamptz[];
    _lost uuid[] := '{}';
    _duplicates uuid[] := '{}';
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(send.domain);
    _queue := _domain.queue_name;
    IF _domain.replies THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('no command can be sent to %L', send.domain),
            HINT = 'It stands for a reply queue. Send to the domain whose commands are answered there';
    END IF;
    IF send.batch_id IS NOT NULL THEN
        PERFORM commandbus.join_batch(send.domain, send.batch_id);
    END IF;

    IF send.reply_to IS NOT NULL THEN
        SELECT r.queue INTO _bad
        FROM (SELECT DISTINCT r FROM unnest(send.reply_to) AS r WHERE r IS NOT NULL) AS r(queue)
        WHERE r.queue NOT IN (SELECT q.queue_name FROM pgmq.list_queues() AS q)
           OR r.queue ~ '__(commands|events|events_dlq)$'
        LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION USING
                ERRCODE = 'CB004',
                MESSAGE = format('there is no reply queue %L', _bad.queue),
                HINT = 'Reply to the queue of a registered domain, such as ' || _domain.reply_queue;
        END IF;
    END IF;

    -- Most calls bring only what is right and new, each once. Then the arrays stay as they are. Of many, some are looked
    -- up to see whether they are new; if others are not, the insert finds out.
    SELECT array_agg(sha256(convert_to(i.command_type || E'\n' || t.body, 'UTF8')) ORDER BY i.ordinal),
           bool_and(coalesce(
               i.command_id IS NOT NULL AND length(i.command_type) BETWEEN 1 AND 255 AND jsonb_typeof(i.data) = 'object'
                   AND coalesce(i.delay, 0) BETWEEN 0 AND 3155760000 AND coalesce(i.max_attempts, 1) > 0,
               false)),
           bool_and(octet_length(t.body) <= _domain.max_payload_bytes AND k.command_id IS NULL)
               AND count(DISTINCT i.command_id) = count(*)
    INTO _hashes, _all_right, _all_new
    FROM unnest(send.command_ids, send.command_types, send.data, send.delays, send.max_attempts)
        WITH ORDINALITY AS i(command_id, command_type, data, delay, max_attempts, ordinal)
    CROSS JOIN LATERAL (SELECT i.data::text AS body) AS t
    LEFT JOIN LATERAL (
        SELECT k.command_id FROM public.command_bus_command k
        WHERE k.domain = send.domain AND k.command_id BETWEEN i.command_id AND i.command_id
          AND i.ordinal % _step = 0
        ORDER BY k.command_id
        LIMIT 1
    ) AS k ON true;

    IF NOT _all_right THEN
        SELECT i.* INTO _bad
        FROM unnest(send.command_ids, send.command_types, send.data, send.delays, send.max_attempts)
            WITH ORDINALITY AS i(command_id, command_type, data, delay, max_attempts, ordinal)
        WHERE i.command_id IS NULL
           OR coalesce(length(i.command_type) NOT BETWEEN 1 AND 255, true)
           OR coalesce(jsonb_typeof(i.data) <> 'object', true)
           OR NOT coalesce(i.delay, 0) BETWEEN 0 AND 3155760000
           OR i.max_attempts < 1
        LIMIT 1;
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('command %s (number %s) of type %L cannot be sent', _bad.command_id, _bad.ordinal, _bad.command_type),
            HINT = 'Each command needs an id, a type of 1 to 255 characters, a JSON object, '
                   'a delay of 0 seconds to 100 years and at least one attempt';
    END IF;

    IF _all_new THEN
        SELECT send.command_ids, send.command_types, send.data, send.reply_to, send.correlation_ids, send.delays,
               send.max_attempts
        INTO _ids, _types, _data, _reply_to, _correlation_ids, _delays, _max_attempts;
    ELSE
        WITH incoming AS (
            SELECT i.*, first_value(i.content_hash) OVER same_id AS first_hash, row_number() OVER same_id AS occurrence
            FROM unnest(send.command_ids, send.command_types, send.data, _hashes, send.reply_to, send.correlation_ids,
                        send.delays, send.max_attempts)
                WITH ORDINALITY AS i(command_id, command_type, data, content_hash, reply_to, correlation_id,
                                     delay, max_attempts, ordinal)
            WINDOW same_id AS (PARTITION BY i.command_id ORDER BY i.ordinal)
        ), known AS (
            SELECT i.*, k.content_hash AS known_hash, k.content_hash IS NULL AND i.occurrence = 1 AS is_new
            FROM incoming i
            LEFT JOIN LATERAL (
                SELECT k.content_hash FROM public.command_bus_command k
                WHERE k.domain = send.domain AND k.command_id BETWEEN i.command_id AND i.command_id
                ORDER BY k.command_id
                LIMIT 1
            ) AS k ON true
            ORDER BY i.ordinal
        )
        SELECT array_agg(k.command_id) FILTER (WHERE octet_length(k.data::text) > _domain.max_payload_bytes),
               array_agg(k.command_id) FILTER (WHERE k.content_hash <> coalesce(k.known_hash, k.first_hash)),
               array_agg(k.command_id) FILTER (WHERE k.is_new),
               array_agg(k.command_type) FILTER (WHERE k.is_new),
               array_agg(k.data) FILTER (WHERE k.is_new),
               array_agg(k.content_hash) FILTER (WHERE k.is_new),
               array_agg(k.reply_to) FILTER (WHERE k.is_new),
               array_agg(k.correlation_id) FILTER (WHERE k.is_new),
               array_agg(k.delay) FILTER (WHERE k.is_new),
               array_agg(k.max_attempts) FILTER (WHERE k.is_new)
        INTO _too_large, _conflicts, _ids, _types, _data, _hashes, _reply_to, _correlation_ids, _delays, _max_attempts
        FROM known k;
    END IF;

    IF _domain.unique_globally THEN
        -- A tombstone in this domain speaks for the command that was known here, so it comes first.
        _conflicts := _conflicts || ARRAY(
            SELECT i.command_id
            FROM unnest(_ids) AS i(command_id)
            CROSS JOIN LATERAL (
                SELECT FROM public.command_bus_command k
                WHERE k.unique_globally AND k.domain <> send.domain
                  AND k.command_id BETWEEN i.command_id AND i.command_id
                ORDER BY k.command_id
                LIMIT 1
            ) AS k
            LEFT JOIN LATERAL (
                SELECT t.command_id FROM public.command_bus_tombstone t
                WHERE t.domain = send.domain AND t.command_id = i.command_id
                LIMIT 1
            ) AS t ON true
            WHERE t.command_id IS NULL
        );
    END IF;
    IF cardinality(_conflicts) > 0 OR _too_large IS NOT NULL THEN
        RETURN QUERY
        SELECT DISTINCT c, 'CONFLICT' FROM unnest(_conflicts) AS c
        UNION
        SELECT DISTINCT t, 'TOO_LARGE' FROM unnest(_too_large) AS t WHERE t <> ALL (coalesce(_conflicts, '{}'));
        RETURN;
    END IF;

    IF cardinality(_ids) > 0 THEN
        _messages := ARRAY(
            SELECT jsonb_build_object(
                'command_id', n.command_id, 'type', n.command_type, 'domain', send.domain,
                'correlation_id', coalesce(n.correlation_id, n.command_id),
                'reply_to', coalesce(n.reply_to, _domain.reply_queue), 'created_at', _now, 'data', n.data
            )
            FROM unnest(_ids, _types, _correlation_ids, _reply_to, _data)
                AS n(command_id, command_type, correlation_id, reply_to, data)
        );
        IF cardinality(_messages) = 1 THEN
            _msg_ids := ARRAY(SELECT s FROM pgmq.send(_queue, _messages[1], _now) AS s);  -- takes half the time
        ELSE
            _msg_ids := ARRAY(SELECT s FROM pgmq.send_batch(_queue, _messages, _now) AS s);
        END IF;
        FOR _delay IN SELECT DISTINCT d FROM unnest(_delays) AS d WHERE d > 0 LOOP
            PERFORM pgmq.set_vt(
                _queue,
                ARRAY(SELECT n.msg_id FROM unnest(_msg_ids, _delays) AS n(msg_id, delay) WHERE n.delay = _delay),
                _now + make_interval(secs => _delay)
            );
        END LOOP;

        -- In the order of the ids, so that two senders of the same ones do not deadlock. Each row gets its time with its
        -- number, also after a wait for a twin: what was sent in a range of time is looked for by number.
        WITH inserted AS (
            INSERT INTO public.command_bus_command (
                domain, queue_name, msg_id, command_id, command_type, status, max_attempts,
                created_at, updated_at, reply_queue, correlation_id, content_hash, unique_globally, batch_id
            )
            SELECT send.domain, _queue, n.msg_id, n.command_id, n.command_type, 'PENDING',
                   coalesce(
                       n.max_attempts,
                       (SELECT t.max_attempts FROM public.command_bus_command_type t
                        WHERE t.domain = send.domain AND t.command_type = n.command_type),
                       _domain.max_attempts),
                   clock_timestamp(), clock_timestamp(), coalesce(n.reply_to, _domain.reply_queue),
                   coalesce(n.correlation_id, n.command_id), n.content_hash, _domain.unique_globally, send.batch_id
            FROM unnest(_msg_ids, _ids, _types, _max_attempts, _reply_to, _correlation_ids, _hashes)
                AS n(msg_id, command_id, command_type, max_attempts, reply_to, correlation_id, content_hash)
            ORDER BY n.command_id
            ON CONFLICT DO NOTHING
            RETURNING id, command_id, created_at
        ), audited AS (
            INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts)
            SELECT send.domain, i.command_id, send.batch_id, 'SENT', i.created_at FROM inserted i
        )
        SELECT coalesce(array_agg(i.command_id), '{}'), array_agg(i.id), array_agg(i.created_at)
        INTO _sent, _rows, _times FROM inserted i;

        -- The insert met twins that no snapshot before it has shown. Those that are still there are seen first and those
        -- that are pruned by now after that, so that none slips through between the two.
        IF cardinality(_sent) < cardinality(_ids) THEN
            _lost := ARRAY(SELECT unnest(_ids) EXCEPT SELECT unnest(_sent));
            _duplicates := ARRAY(
                SELECT n.command_id
                FROM unnest(_ids, _hashes, _msg_ids) AS n(command_id, content_hash, msg_id)
                CROSS JOIN LATERAL (
                    SELECT k.content_hash, k.msg_id FROM public.command_bus_command k
                    WHERE k.domain = send.domain AND k.command_id BETWEEN n.command_id AND n.command_id
                    ORDER BY k.command_id
                    LIMIT 1
                ) AS k
                WHERE k.content_hash = n.content_hash AND k.msg_id IS DISTINCT FROM n.msg_id
            );
        END IF;
        SELECT _duplicates || array_agg(n.command_id) FILTER (WHERE t.content_hash = n.content_hash),
               array_agg(n.command_id) FILTER (WHERE t.content_hash <> n.content_hash)
        INTO _duplicates, _conflicts
        FROM unnest(_ids, _hashes) AS n(command_id, content_hash)
        CROSS JOIN LATERAL (
            SELECT t.content_hash FROM public.command_bus_tombstone t
            WHERE t.domain = send.domain AND t.command_id = n.command_id
            LIMIT 1
        ) AS t;
        IF _domain.unique_globally THEN
            _conflicts := _conflicts || ARRAY(
                SELECT n.command_id
                FROM unnest(_ids) AS n(command_id)
                CROSS JOIN LATERAL (
                    SELECT FROM public.command_bus_tombstone o
                    WHERE o.unique_globally AND o.domain <> send.domain
                      AND o.command_id BETWEEN n.command_id AND n.command_id
                    ORDER BY o.command_id
                    LIMIT 1
                ) AS o
                WHERE n.command_id <> ALL (_duplicates)
            );
        END IF;
        IF cardinality(_lost) > 0 THEN
            _conflicts := _conflicts || ARRAY(SELECT unnest(_lost) EXCEPT SELECT unnest(_duplicates));
        END IF;

        IF cardinality(_conflicts) > 0 THEN
            DELETE FROM public.command_bus_command k WHERE k.id = ANY (_rows);
            DELETE FROM public.command_bus_audit a
            WHERE a.command_id = ANY (_sent) AND a.domain = send.domain AND a.ts = ANY (_times);
            PERFORM pgmq.delete(_queue, _msg_ids);
            RETURN QUERY SELECT DISTINCT c, 'CONFLICT' FROM unnest(_conflicts) AS c;
            RETURN;
        END IF;
        IF cardinality(_duplicates) > 0 THEN
            DELETE FROM public.command_bus_command k
            WHERE k.id = ANY (ARRAY(
                SELECT n.id FROM unnest(_sent, _rows) AS n(command_id, id) WHERE n.command_id = ANY (_duplicates)
            ));
            PERFORM pgmq.delete(
                _queue,
                ARRAY(SELECT n.msg_id FROM unnest(_ids, _msg_ids) AS n(command_id, msg_id) WHERE n.command_id = ANY (_duplicates))
            );
            DELETE FROM public.command_bus_audit a
            WHERE a.command_id = ANY (_duplicates) AND a.domain = send.domain AND a.ts = ANY (_times);
            _sent := ARRAY(SELECT unnest(_sent) EXCEPT SELECT unnest(_duplicates));
        END IF;

        IF _domain.archive_payloads THEN
            INSERT INTO public.command_bus_payload_archive (domain, command_id, payload_json, archived_at)
            SELECT send.domain, n.command_id, n.data, _now
            FROM unnest(_ids, _data) AS n(command_id, data)
            WHERE n.command_id <> ALL (_duplicates)
            ON CONFLICT DO NOTHING;
        END IF;
    END IF;

    IF send.batch_id IS NOT NULL THEN
        PERFORM commandbus.count_sent(send.domain, send.batch_id, send.command_ids, _sent);
    END IF;
    IF send.wake AND cardinality(_sent) > 0 THEN
        PERFORM commandbus.wake(send.domain);
    END IF;
    RETURN QUERY SELECT i, 'SENT' FROM unnest(_sent) AS i;
    IF NOT _all_new OR cardinality(_sent) < cardinality(_ids) THEN
        RETURN QUERY SELECT i, 'DUPLICATE' FROM unnest(send.command_ids) AS i EXCEPT SELECT i, 'DUPLICATE' FROM unnest(_sent) AS i;
    END IF;
END;
$function$;
