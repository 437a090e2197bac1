-- Makes suspects of commands: each may have killed the process that held it, so each will run alone in a process of its
-- own before anyone runs it beside others again (receive_suspect). Answers those it has dealt with; a command that
-- somebody has locked, that is free of suspicion, or that has ended meanwhile is left alone.
--
-- The delivery that ended without a word was no attempt. Only if it was an isolated run already does it count against
-- the command: as a crash if the supervisor has `seen` the process die, else as vanished, because then whatever ended
-- the supervisor may have ended the run as well. At the domain's crash_limit, or at five times as many runs that
-- vanished, the command goes to the Troubleshooting Queue. `judge`: the node that has found the commands.
CREATE OR REPLACE FUNCTION commandbus.accuse(domain text, command_ids uuid[], judge uuid, seen boolean DEFAULT false)
RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
#variable_conflict use_column
DECLARE
    _queue text := commandbus.queue_of(accuse.domain);
    _crash_limit integer := (commandbus.require_domain(accuse.domain)).crash_limit;
    _now timestamptz := clock_timestamp();
    _rows bigint[] := commandbus.rows_of(accuse.domain, accuse.command_ids);
    _ids uuid[];
    _hidden bigint[];
    _archive bigint[];
BEGIN
    WITH accused AS MATERIALIZED (
        SELECT c.id,
               CASE WHEN c.lease_read_ct IS NULL THEN 0 ELSE 1 END AS wordless,
               CASE WHEN c.lease_read_ct IS NOT NULL AND c.suspect AND v.verdict = 'SUSPECT' THEN 1 ELSE 0 END AS died
        FROM public.command_bus_command c
        CROSS JOIN LATERAL (
            SELECT CASE WHEN c.lease_read_ct IS NOT NULL
                        THEN commandbus.judge_lease(c.node_id, c.lease_expires_at, accuse.judge) END AS verdict
        ) AS v
        WHERE c.id = ANY (_rows)
          AND c.status IN ('PENDING', 'IN_PROGRESS')
          AND (v.verdict = 'SUSPECT' OR (c.suspect AND coalesce(v.verdict, 'AGAIN') = 'AGAIN'))
        ORDER BY c.id
        FOR UPDATE OF c SKIP LOCKED
    ), counted AS (
        UPDATE public.command_bus_command c
        SET crash_count = c.crash_count + CASE WHEN accuse.seen THEN a.died ELSE 0 END,
            vanished_count = c.vanished_count + CASE WHEN accuse.seen THEN 0 ELSE a.died END,
            attempts = c.attempts - a.wordless,
            suspect = true,
            status = 'PENDING',
            lease_read_ct = NULL,
            lease_expires_at = NULL,
            updated_at = _now
        FROM accused a
        WHERE c.id = ANY (ARRAY[a.id])
        RETURNING c.id, c.command_id, c.batch_id, c.msg_id, c.node_id, c.crash_count, c.vanished_count, a.wordless,
                  c.crash_count >= _crash_limit OR c.vanished_count >= 5 * _crash_limit AS convicted
    ), suspected AS (
        INSERT INTO public.command_bus_suspect (id, domain, command_id, msg_id, since)
        SELECT c.id, accuse.domain, c.command_id, c.msg_id, _now FROM counted c WHERE NOT c.convicted
        ORDER BY c.id
        ON CONFLICT (id) DO UPDATE SET msg_id = excluded.msg_id
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT accuse.domain, c.command_id, c.batch_id, 'RELEASED', _now,
               jsonb_build_object('reason', 'WORKER_LOST', 'node_id', c.node_id,
                                  'crashes', c.crash_count, 'vanished', c.vanished_count)
        FROM counted c
        WHERE c.wordless = 1
    )
    SELECT array_agg(c.command_id),
           array_agg(c.msg_id) FILTER (WHERE NOT c.convicted),
           array_agg(c.id) FILTER (WHERE c.convicted)
    INTO _ids, _hidden, _archive
    FROM counted c;

    IF _hidden IS NOT NULL THEN
        -- receive_suspect reaches them by their id. Should a suspect be forgotten, it comes back this way.
        PERFORM pgmq.set_vt(_queue, _hidden, _now + interval '1 hour');
    END IF;
    IF _archive IS NOT NULL THEN
        PERFORM commandbus.convict(accuse.domain, _archive);
    END IF;
    RETURN QUERY SELECT unnest(_ids);
END;
$function$;

-- Moves commands, by the ids of their locked rows, to the Troubleshooting Queue: they have killed too often.
CREATE OR REPLACE FUNCTION commandbus.convict(domain text, ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DECLARE
    _now timestamptz := clock_timestamp();
    _msg_ids bigint[];
    _batches uuid[];
BEGIN
    WITH convicted AS (
        UPDATE public.command_bus_command c
        SET status = 'IN_TROUBLESHOOTING_QUEUE',
            last_error_type = 'WorkerCrashed',
            last_error_code = 'WORKER_CRASHED',
            last_error_msg = format(
                'the process that ran only this command died %s times before the eyes of its supervisor; %s times it vanished '
                'together with it, or stood still for too long',
                c.crash_count, c.vanished_count),
            updated_at = _now
        WHERE c.id = ANY (convict.ids)
        RETURNING c.*
    ), audited AS (
        INSERT INTO public.command_bus_audit (domain, command_id, batch_id, event_type, ts, details_json)
        SELECT convict.domain, c.command_id, c.batch_id, 'MOVED_TO_TROUBLESHOOTING_QUEUE', _now,
               jsonb_build_object(
                   'reason', 'WORKER_CRASHED', 'attempt', c.attempts, 'max_attempts', c.max_attempts,
                   'node_id', c.node_id, 'crashes', c.crash_count, 'vanished', c.vanished_count,
                   'error', jsonb_build_object('type', c.last_error_type, 'code', c.last_error_code,
                                               'message', c.last_error_msg))
        FROM convicted c
    )
    SELECT array_agg(c.msg_id), array_agg(c.batch_id) FILTER (WHERE c.batch_id IS NOT NULL)
    INTO _msg_ids, _batches
    FROM convicted c;
    PERFORM pgmq.archive(commandbus.queue_of(convict.domain), _msg_ids);
    IF _batches IS NOT NULL THEN
        PERFORM commandbus.count_in_batches(
            _batches, array_fill('IN_TROUBLESHOOTING_QUEUE'::text, ARRAY[cardinality(_batches)]), _now);
    END IF;
END;
$function$;
