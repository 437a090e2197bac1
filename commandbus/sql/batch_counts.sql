-- How commands are counted in batches. A row that every commit would update is a queue of one. So whoever changes a
-- command inserts a row that says what changed, in the same transaction, and commandbus.fold_batches adds them up. What a
-- batch counts at any moment is its own row and those that are not folded yet.

-- `statuses`: what became of a command of each batch; null if it waits again. `left_troubleshooting`: before that, they
-- were in the Troubleshooting Queue.
CREATE OR REPLACE FUNCTION commandbus.count_in_batches(
    batch_ids uuid[], statuses text[], at timestamptz, left_troubleshooting boolean DEFAULT false
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO public.command_bus_batch_delta (
        batch_id, completed_count, failed_count, canceled_count, in_troubleshooting_count, at
    )
    SELECT n.batch_id,
           count(*) FILTER (WHERE n.status = 'COMPLETED'),
           count(*) FILTER (WHERE n.status = 'FAILED'),
           count(*) FILTER (WHERE n.status = 'CANCELED'),
           count(*) FILTER (WHERE n.status = 'IN_TROUBLESHOOTING_QUEUE')
               - CASE WHEN count_in_batches.left_troubleshooting THEN count(*) ELSE 0 END,
           count_in_batches.at
    FROM unnest(count_in_batches.batch_ids, count_in_batches.statuses) AS n(batch_id, status)
    GROUP BY n.batch_id;
END;
$function$;

-- Takes part in a batch until the end of the transaction: it cannot be sealed meanwhile, but it can be folded. The lock on
-- the row says so. Shares of a row are given past those who wait for all of it, so that a seal could wait for ever while
-- others add in turns. In front of an advisory lock there is a queue.
CREATE OR REPLACE FUNCTION commandbus.join_batch(domain text, batch_id uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(commandbus.batch_key(join_batch.batch_id));
    PERFORM FROM public.command_bus_batch b
    WHERE b.batch_id = join_batch.batch_id AND b.domain IS NOT DISTINCT FROM join_batch.domain  -- as in rows_of
    FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM commandbus.raise_unknown_batch(join_batch.domain, join_batch.batch_id);
    END IF;
END;
$function$;

-- Of the advisory lock of a batch.
CREATE OR REPLACE FUNCTION commandbus.batch_key(batch_id uuid)
RETURNS bigint
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT hashtextextended('commandbus.batch ' || batch_id, 0)
$function$;

CREATE OR REPLACE FUNCTION commandbus.raise_unknown_batch(domain text, batch_id uuid)
RETURNS void
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'CB005',
        MESSAGE = format('there is no batch %s in domain %L', raise_unknown_batch.batch_id, raise_unknown_batch.domain),
        HINT = 'It was not created, not committed, or pruned meanwhile; create it with create_batch or open_batch';
END;
$function$;

-- Counts what was `sent` of `command_ids` as part of a batch that this transaction has joined.
CREATE OR REPLACE FUNCTION commandbus.count_sent(domain text, batch_id uuid, command_ids uuid[], sent uuid[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    _sent integer := coalesce(cardinality(count_sent.sent), 0);
    _batch public.command_bus_batch;
    _stranger uuid;
BEGIN
    SELECT b.* INTO _batch FROM public.command_bus_batch b WHERE b.batch_id = count_sent.batch_id;
    IF _sent < cardinality(count_sent.command_ids) THEN
        SELECT d.command_id INTO _stranger
        FROM (SELECT unnest(count_sent.command_ids) EXCEPT SELECT unnest(count_sent.sent)) AS d(command_id)
        LEFT JOIN LATERAL (
            SELECT k.command_id, k.batch_id FROM public.command_bus_command k
            WHERE k.domain = count_sent.domain AND k.command_id BETWEEN d.command_id AND d.command_id
            ORDER BY k.command_id
            LIMIT 1
        ) AS k ON true
        WHERE k.batch_id IS DISTINCT FROM count_sent.batch_id
          -- What is pruned may have been part of a batch that is as old.
          AND (k.command_id IS NOT NULL OR _batch.completed_at IS NULL)
        LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION USING
                ERRCODE = 'CB007',
                MESSAGE = format('command %s was sent to domain %L before, but not as part of this batch', _stranger,
                                 count_sent.domain),
                DETAIL = format('%s %s', count_sent.domain, _stranger),
                HINT = 'Leave it out, or send it under a new id';
        END IF;
    END IF;
    IF _sent = 0 THEN
        RETURN;
    END IF;
    IF (_batch.on_complete ->> 'command_id')::uuid = ANY (count_sent.sent) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('command %s has the id of the command that is sent when batch %s completes',
                             _batch.on_complete ->> 'command_id', _batch.batch_id),
            HINT = 'Give each of them an id of its own';
    END IF;
    IF _batch.sealed_at IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB006',
            MESSAGE = format('batch %s takes no more commands: it was %s at %s, and command %s is new', _batch.batch_id,
                             CASE WHEN _batch.canceled_at IS NULL THEN 'sealed' ELSE 'canceled' END,
                             coalesce(_batch.canceled_at, _batch.sealed_at), count_sent.sent[1]),
            HINT = 'Open another batch for it, or send it without one';
    END IF;
    INSERT INTO public.command_bus_batch_delta (batch_id, total_count, at)
    VALUES (_batch.batch_id, _sent, clock_timestamp());
END;
$function$;

-- A batch as it is at this moment: its row, and what is not folded yet. Null if there is none. That it has completed is
-- true only when fold_batches says so.
CREATE OR REPLACE FUNCTION commandbus.batch_now(batch_id uuid)
RETURNS jsonb
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
BEGIN
    RETURN (
        SELECT to_jsonb(b) || CASE WHEN d.updated_at IS NULL THEN '{}' ELSE jsonb_build_object(
            'total_count', b.total_count + d.total,
            'completed_count', b.completed_count + d.completed,
            'failed_count', b.failed_count + d.failed,
            'canceled_count', b.canceled_count + d.canceled,
            'in_troubleshooting_count', b.in_troubleshooting_count + d.in_troubleshooting,
            'started_at', coalesce(b.started_at, d.started_at),
            'updated_at', greatest(b.updated_at, d.updated_at),
            'status', CASE WHEN b.status = 'PENDING' AND d.started_at IS NOT NULL THEN 'IN_PROGRESS' ELSE b.status END
        ) END
        FROM public.command_bus_batch b
        CROSS JOIN (
            SELECT sum(d.total_count) AS total, sum(d.completed_count) AS completed, sum(d.failed_count) AS failed,
                   sum(d.canceled_count) AS canceled, sum(d.in_troubleshooting_count) AS in_troubleshooting,
                   min(d.started_at) AS started_at, max(d.at) AS updated_at
            FROM public.command_bus_batch_delta d
            WHERE d.batch_id = batch_now.batch_id
        ) AS d
        WHERE b.batch_id = batch_now.batch_id
    );
END;
$function$;
