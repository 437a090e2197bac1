-- Makes a domain known, creates its four queues where they are missing, and stores the settings that the SQL
-- functions need. Safe to repeat; a paused domain stays paused.
--
-- With `replies` it stands for the reply queue of its name: what arrives there becomes a command of this domain.
CREATE OR REPLACE FUNCTION commandbus.register_domain(
    name text,
    reply_queue text DEFAULT NULL,
    max_attempts integer DEFAULT 3,
    mark_in_progress boolean DEFAULT true,
    unique_globally boolean DEFAULT false,
    reset_attempts boolean DEFAULT true,
    archive_payloads boolean DEFAULT false,
    max_payload_bytes integer DEFAULT 1048576,
    crash_limit integer DEFAULT 2,
    unknown_type_grace double precision DEFAULT 300,
    replies boolean DEFAULT false
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _queue_name text := register_domain.name || CASE WHEN register_domain.replies THEN '' ELSE '__commands' END;
    _reply_queue text := CASE WHEN register_domain.replies THEN register_domain.name
                              ELSE coalesce(register_domain.reply_queue, register_domain.name || '__replies') END;
    _queue text;
    _wanted text[] := ARRAY[_queue_name, _reply_queue];
BEGIN
    IF NOT register_domain.replies THEN
        IF register_domain.name !~ '^[a-z][a-z0-9_-]*$' OR length(register_domain.name) > 35
           OR register_domain.name ~ '__(commands|replies|events|events_dlq)$' THEN
            RAISE EXCEPTION USING
                ERRCODE = 'CB002',
                MESSAGE = format('domain name %L is not valid', register_domain.name),
                HINT = 'Use at most 35 characters: a lower-case letter, then lower-case letters, digits, "_" or "-"; '
                       'but not the name of a queue';
        END IF;
        _wanted := _wanted || ARRAY[
            register_domain.name || '__replies', register_domain.name || '__events', register_domain.name || '__events_dlq'
        ];
    END IF;
    IF _reply_queue !~ '^[a-z][a-z0-9_-]*$' OR length(_reply_queue) > 47
       OR _reply_queue ~ '__(commands|events|events_dlq)$' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('reply queue %L of domain %L is not valid', _reply_queue, register_domain.name),
            HINT = 'Use at most 47 characters of a-z, 0-9, "_" or "-", and no name that a domain uses for another queue';
    END IF;

    -- One at a time: PGMQ's own CREATE TABLE IF NOT EXISTS is not safe against itself.
    PERFORM pg_advisory_xact_lock(hashtextextended('commandbus.register_domain', 0));
    FOR _queue IN
        SELECT DISTINCT w FROM unnest(_wanted) AS w
        EXCEPT
        SELECT q.queue_name::text FROM pgmq.list_queues() AS q
    LOOP
        PERFORM pgmq.create(_queue);
    END LOOP;
    IF EXISTS (SELECT FROM public.command_bus_domain d
               WHERE d.name = register_domain.name AND d.replies <> register_domain.replies) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('%L cannot be both a domain and the name of a reply queue', register_domain.name),
            HINT = 'Give COMMANDBUS["REPLY_QUEUE"] another name';
    END IF;

    INSERT INTO public.command_bus_domain AS d (
        name, queue_name, replies, reply_queue, max_attempts, mark_in_progress, unique_globally,
        reset_attempts, archive_payloads, max_payload_bytes, crash_limit, unknown_type_grace, created_at
    )
    VALUES (
        register_domain.name, _queue_name, register_domain.replies, nullif(_reply_queue, _queue_name),
        register_domain.max_attempts, register_domain.mark_in_progress,
        register_domain.unique_globally, register_domain.reset_attempts, register_domain.archive_payloads,
        register_domain.max_payload_bytes, register_domain.crash_limit, register_domain.unknown_type_grace,
        clock_timestamp()
    )
    ON CONFLICT ON CONSTRAINT command_bus_domain_pkey DO UPDATE SET
        reply_queue = excluded.reply_queue,
        max_attempts = excluded.max_attempts,
        mark_in_progress = excluded.mark_in_progress,
        unique_globally = excluded.unique_globally,
        reset_attempts = excluded.reset_attempts,
        archive_payloads = excluded.archive_payloads,
        max_payload_bytes = excluded.max_payload_bytes,
        crash_limit = excluded.crash_limit,
        unknown_type_grace = excluded.unknown_type_grace
    WHERE (d.reply_queue, d.max_attempts, d.mark_in_progress, d.unique_globally,
           d.reset_attempts, d.archive_payloads, d.max_payload_bytes, d.crash_limit, d.unknown_type_grace)
        IS DISTINCT FROM
          (excluded.reply_queue, excluded.max_attempts, excluded.mark_in_progress, excluded.unique_globally,
           excluded.reset_attempts, excluded.archive_payloads, excluded.max_payload_bytes,
           excluded.crash_limit, excluded.unknown_type_grace);
END;
$function$;
