-- Adds up what was counted (batch_counts.sql) in the rows of the batches, and completes those whose commands have all
-- ended: status, audit, and the on_complete command, in one transaction, which is the only one that can. `completed` has
-- these, as an array of JSON objects; `postponed` those that could not be completed now, and why.
--
-- One call takes up to `at_most` batches and `most_deltas` counts, from the batch `after` on; `next_after` says where the
-- next call goes on, and is null when that was all. Each call is best a transaction of its own.
--
-- One folds at a time; another call at the same time does nothing. It waits for nobody, but for a moment for one who is just
-- sending a command with the id of an on_complete command: a batch that somebody has locked is left for later, with
-- what was counted for it.
CREATE OR REPLACE FUNCTION commandbus.fold_batches(
    after uuid DEFAULT NULL,
    at_most integer DEFAULT 200,
    most_deltas integer DEFAULT 20000,
    OUT completed jsonb,
    OUT next_after uuid,
    OUT postponed jsonb
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '100ms'
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
DECLARE
    _next uuid := coalesce(fold_batches.after, '00000000-0000-0000-0000-000000000000');
    _found uuid[] := '{}';
    _batches uuid[];
    _batch public.command_bus_batch;
    _taken integer;
    _last_taken uuid;
    _somebody_sends boolean := false;
BEGIN
    PERFORM commandbus.require_read_committed();
    completed := '[]';
    postponed := '[]';
    WHILE cardinality(_found) < fold_batches.at_most LOOP
        SELECT d.batch_id INTO _next
        FROM public.command_bus_batch_delta d
        WHERE d.batch_id > _next
        ORDER BY d.batch_id, d.id
        LIMIT 1;
        EXIT WHEN NOT FOUND;
        _found := array_append(_found, _next);
    END LOOP;
    IF cardinality(_found) = 0 OR NOT pg_try_advisory_xact_lock(hashtextextended('commandbus.fold_batches', 0)) THEN
        RETURN;
    END IF;

    _batches := ARRAY(
        SELECT b.batch_id FROM public.command_bus_batch b
        WHERE b.batch_id = ANY (_found)
        ORDER BY b.batch_id
        FOR NO KEY UPDATE SKIP LOCKED
    );
    WITH taken AS (
        DELETE FROM public.command_bus_batch_delta d
        USING (
            SELECT w.batch_id, w.id
            FROM unnest(_batches) WITH ORDINALITY AS b(batch_id, ordinal)
            CROSS JOIN LATERAL (
                SELECT w.batch_id, w.id FROM public.command_bus_batch_delta w
                WHERE w.batch_id = b.batch_id
                ORDER BY w.batch_id, w.id
                LIMIT fold_batches.most_deltas
            ) AS w
            LIMIT fold_batches.most_deltas
        ) AS w
        WHERE d.batch_id = ANY (ARRAY[w.batch_id]) AND d.id BETWEEN w.id AND w.id  -- as in rows_of
        RETURNING d.*
    ), news AS (
        SELECT t.batch_id, sum(t.total_count) AS total, sum(t.completed_count) AS completed, sum(t.failed_count) AS failed,
               sum(t.canceled_count) AS canceled, sum(t.in_troubleshooting_count) AS in_troubleshooting,
               min(t.started_at) AS started_at, max(t.at) AS at
        FROM taken t
        GROUP BY t.batch_id
    ), folded AS (
        UPDATE public.command_bus_batch b
        SET total_count = b.total_count + n.total,
            completed_count = b.completed_count + n.completed,
            failed_count = b.failed_count + n.failed,
            canceled_count = b.canceled_count + n.canceled,
            in_troubleshooting_count = b.in_troubleshooting_count + n.in_troubleshooting,
            started_at = coalesce(b.started_at, n.started_at),
            updated_at = greatest(b.updated_at, n.at),
            status = CASE WHEN b.status = 'PENDING' AND n.started_at IS NOT NULL THEN 'IN_PROGRESS' ELSE b.status END
        FROM (
            SELECT n.*, o.started_at AS started_before
            FROM news n
            CROSS JOIN LATERAL (
                SELECT o.started_at FROM public.command_bus_batch o WHERE o.batch_id = n.batch_id LIMIT 1
            ) AS o
        ) AS n
        WHERE b.batch_id = ANY (ARRAY[n.batch_id])
        RETURNING b.domain, b.batch_id, b.started_at, b.started_at IS NOT NULL AND n.started_before IS NULL AS begins
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, batch_id, event_type, ts, details_json)
        SELECT f.domain, f.batch_id, 'BATCH_STARTED', clock_timestamp(), jsonb_build_object('started_at', f.started_at)
        FROM folded f
        WHERE f.begins
    )
    SELECT count(*), (array_agg(t.batch_id ORDER BY t.batch_id DESC))[1] INTO _taken, _last_taken FROM taken t;

    -- Only of a batch with nothing left to fold do the counts say what its commands are. This statement sees all that was
    -- counted before it: also by whoever added commands to a batch that it sees sealed.
    FOR _batch IN
        SELECT b.*
        FROM public.command_bus_batch b
        WHERE b.batch_id = ANY (_batches)
          AND b.sealed_at IS NOT NULL AND b.completed_at IS NULL
          AND b.completed_count + b.failed_count + b.canceled_count = b.total_count
          AND (SELECT d.id FROM public.command_bus_batch_delta d WHERE d.batch_id = b.batch_id LIMIT 1) IS NULL
        ORDER BY b.batch_id
    LOOP
        _batch.completed_at := _batch.updated_at;
        _batch.status := CASE WHEN _batch.failed_count + _batch.canceled_count > 0
                              THEN 'COMPLETED_WITH_FAILURES' ELSE 'COMPLETED' END;
        BEGIN
            IF _somebody_sends AND _batch.on_complete IS NOT NULL THEN
                RAISE lock_not_available;  -- one wait is enough for one call
            END IF;
            _batch.callback_error := commandbus.call_back(_batch);
        EXCEPTION WHEN OTHERS THEN
            -- The next fold tries again. The other batches do not wait for this one.
            INSERT INTO public.command_bus_batch_delta (batch_id, at) VALUES (_batch.batch_id, _batch.updated_at);
            IF SQLSTATE IN ('55P03', '40P01') THEN  -- somebody is just sending a command with the id of this one
                _somebody_sends := true;
            ELSIF SQLSTATE <> '42501' THEN  -- (that: it is for somebody else who may send it)
                postponed := postponed || jsonb_build_object(
                    'domain', _batch.domain, 'batch_id', _batch.batch_id, 'error', SQLERRM);
            END IF;
            CONTINUE;
        END;
        UPDATE public.command_bus_batch b
        SET status = _batch.status,
            completed_at = _batch.completed_at,
            callback_sent_at = CASE WHEN b.on_complete IS NOT NULL AND _batch.callback_error IS NULL
                                    THEN clock_timestamp() END,
            callback_error = _batch.callback_error
        WHERE b.batch_id = _batch.batch_id;
        INSERT INTO public.command_bus_audit (domain, batch_id, event_type, ts, details_json)
        VALUES (_batch.domain, _batch.batch_id, 'BATCH_COMPLETED', clock_timestamp(),
                jsonb_build_object(
                    'status', _batch.status, 'total_count', _batch.total_count,
                    'completed_count', _batch.completed_count, 'failed_count', _batch.failed_count,
                    'canceled_count', _batch.canceled_count, 'completed_at', _batch.completed_at
                ) || CASE WHEN _batch.callback_error IS NULL THEN '{}'
                          ELSE jsonb_build_object('callback_error', _batch.callback_error) END);
        completed := completed || jsonb_build_object(
            'domain', _batch.domain, 'batch_id', _batch.batch_id, 'status', _batch.status,
            'callback_error', _batch.callback_error);
    END LOOP;

    IF _taken >= fold_batches.most_deltas THEN  -- the last of them may have more
        SELECT f INTO next_after FROM unnest(_found) AS f WHERE f < _last_taken ORDER BY f DESC LIMIT 1;
        next_after := coalesce(next_after, fold_batches.after, '00000000-0000-0000-0000-000000000000');
    ELSIF cardinality(_found) >= fold_batches.at_most THEN
        next_after := _next;
    END IF;
END;
$function$;

-- Sends the on_complete command of a batch, with what has become of the batch under `batch` in its data. Answers why it
-- cannot be sent, if that will be so the next time too: the batch must complete all the same, and it is shown there.
CREATE OR REPLACE FUNCTION commandbus.call_back(batch public.command_bus_batch)
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _command jsonb := (batch).on_complete;
    _outcome text;
BEGIN
    IF _command IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT s.outcome INTO _outcome
    FROM commandbus.send(
        (batch).domain,
        ARRAY[(_command ->> 'command_id')::uuid],
        ARRAY[_command ->> 'command_type'],
        ARRAY[(_command -> 'data') || jsonb_build_object('batch', commandbus.batch_summary(batch))],
        ARRAY[_command ->> 'reply_to'],
        ARRAY[(_command ->> 'correlation_id')::uuid],
        ARRAY[(_command ->> 'delay')::double precision],
        wake => true
    ) AS s;
    RETURN CASE _outcome
        WHEN 'SENT' THEN NULL
        WHEN 'TOO_LARGE' THEN 'its data take more bytes than the domain allows'
        ELSE format('a command with its id %s was sent before', _command ->> 'command_id') END;
EXCEPTION WHEN OTHERS THEN
    IF SQLSTATE ~ '^(08|25|40|42501|53|55|57|58|XX)' THEN
        RAISE;
    END IF;
    RETURN SQLERRM;
END;
$function$;
