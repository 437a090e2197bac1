-- Makes a batch that commands can be sent into (commandbus.send) until it is sealed. Answers whether it is new: opening
-- it again with the same content does nothing. `expected_count`: how many commands it shall have when it is sealed, if
-- that is known. `on_complete`: the command that is sent when all of its commands have ended, as
-- {"command_type", "command_id", "data", "reply_to", "correlation_id", "delay"}, the last three optional.
CREATE OR REPLACE FUNCTION commandbus.open_batch(
    domain text,
    batch_id uuid,
    name text DEFAULT NULL,
    custom_data jsonb DEFAULT NULL,
    expected_count integer DEFAULT NULL,
    on_complete jsonb DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _domain public.command_bus_domain;
    _batch public.command_bus_batch;
    _differs text;
BEGIN
    PERFORM commandbus.require_read_committed();
    _domain := commandbus.require_domain(open_batch.domain);
    IF _domain.replies OR coalesce(open_batch.batch_id = '00000000-0000-0000-0000-000000000000', true) OR length(open_batch.name) NOT BETWEEN 1 AND 255
       OR jsonb_typeof(open_batch.custom_data) <> 'object' OR open_batch.expected_count < 0 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('batch %s (%L) of domain %L cannot be created', open_batch.batch_id, open_batch.name,
                             open_batch.domain),
            HINT = 'A batch needs an id that is not all zeros and a domain of commands; its name has 1 to 255 characters, its custom data are a '
                   'JSON object, and it expects 0 commands or more';
    END IF;

    INSERT INTO public.command_bus_batch AS b (
        batch_id, domain, name, custom_data, expected_count, on_complete, status, created_at, updated_at
    )
    VALUES (open_batch.batch_id, open_batch.domain, open_batch.name, open_batch.custom_data, open_batch.expected_count,
            open_batch.on_complete, 'PENDING', clock_timestamp(), clock_timestamp())
    ON CONFLICT DO NOTHING
    RETURNING b.* INTO _batch;
    IF FOUND THEN
        PERFORM commandbus.verify_callback(_domain, _batch);
        RETURN true;
    END IF;

    SELECT b.* INTO _batch FROM public.command_bus_batch b WHERE b.batch_id = open_batch.batch_id;
    _differs := CASE
        WHEN _batch.domain IS DISTINCT FROM open_batch.domain THEN 'domain'
        WHEN _batch.name IS DISTINCT FROM open_batch.name THEN 'name'
        WHEN _batch.custom_data IS DISTINCT FROM open_batch.custom_data THEN 'custom_data'
        WHEN _batch.expected_count IS DISTINCT FROM open_batch.expected_count THEN 'total'
        WHEN _batch.on_complete IS DISTINCT FROM open_batch.on_complete THEN 'on_complete'
    END;
    IF _differs IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB006',
            MESSAGE = format('batch %s exists already, with another %s', open_batch.batch_id, _differs),
            HINT = 'Open it with what it was opened with first, or choose another id';
    END IF;
    RETURN false;
END;
$function$;

-- Raises an error unless the batch's on_complete command can be sent as it is now.
CREATE OR REPLACE FUNCTION commandbus.verify_callback(domain public.command_bus_domain, batch public.command_bus_batch)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _command jsonb := (batch).on_complete;
    _data jsonb;
    _wrong text;
BEGIN
    IF _command IS NULL THEN
        RETURN;
    END IF;
    IF jsonb_typeof(_command) = 'object' AND jsonb_typeof(_command -> 'data') = 'object' THEN
        _data := (_command -> 'data') || jsonb_build_object('batch', commandbus.batch_summary(batch));
    END IF;
    _wrong := CASE
        WHEN jsonb_typeof(_command) <> 'object' THEN 'it is not a JSON object'
        WHEN commandbus.command_id_of(_command - 'outcome') IS NULL THEN 'its command_id is not a UUID'
        WHEN coalesce(length(_command ->> 'command_type') NOT BETWEEN 1 AND 255, true)
        THEN 'its type must have 1 to 255 characters'
        WHEN _command ->> 'correlation_id' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
        THEN 'its correlation_id is not a UUID'
        WHEN jsonb_typeof(_command -> 'delay') <> 'number' OR NOT (_command ->> 'delay')::numeric BETWEEN 0 AND 3155760000
        THEN 'its delay must be from 0 seconds to 100 years'
        WHEN jsonb_typeof(_command -> 'data') IS DISTINCT FROM 'object' THEN 'its data must be a JSON object'
        WHEN _command -> 'data' ? 'batch' THEN 'its data must leave the key "batch" free: the summary goes there'
        -- The summary grows by the digits of its counts and by its times.
        WHEN octet_length(_data::text) + 300 > (domain).max_payload_bytes
        THEN format('with the summary of the batch, its data take more than the %s bytes that the domain allows',
                    (domain).max_payload_bytes)
        WHEN commandbus.was_sent(domain, (_command ->> 'command_id')::uuid)
        THEN format('its id %s was sent before', _command ->> 'command_id')
        WHEN _command ->> 'reply_to' NOT IN (SELECT q.queue_name FROM pgmq.list_queues() AS q)
             OR _command ->> 'reply_to' ~ '__(commands|events|events_dlq)$'
        THEN format('there is no reply queue %L', _command ->> 'reply_to')
    END;
    IF _wrong IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB002',
            MESSAGE = format('the on_complete command of batch %s cannot be sent: %s', (batch).batch_id, _wrong),
            HINT = 'Give it a new id, a type, and a JSON object that is small enough';
    END IF;
END;
$function$;

-- Whether a new command of this domain cannot have this id any more.
CREATE OR REPLACE FUNCTION commandbus.was_sent(domain public.command_bus_domain, command_id uuid)
RETURNS boolean
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT (commandbus.rows_of((was_sent.domain).name, ARRAY[was_sent.command_id]))[1] IS NOT NULL
        OR EXISTS (SELECT FROM public.command_bus_tombstone t
                   WHERE t.domain = (was_sent.domain).name AND t.command_id = was_sent.command_id)
        OR (was_sent.domain).unique_globally AND (
            EXISTS (SELECT FROM public.command_bus_command c
                    WHERE c.unique_globally AND c.command_id = was_sent.command_id)
            OR EXISTS (SELECT FROM public.command_bus_tombstone t
                       WHERE t.unique_globally AND t.command_id = was_sent.command_id))
$function$;

-- What the on_complete command is told of its batch.
CREATE OR REPLACE FUNCTION commandbus.batch_summary(batch public.command_bus_batch)
RETURNS jsonb
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT jsonb_build_object(
        'batch_id', (batch).batch_id, 'domain', (batch).domain, 'name', (batch).name,
        'custom_data', (batch).custom_data, 'status', (batch).status,
        'total_count', (batch).total_count, 'completed_count', (batch).completed_count,
        'failed_count', (batch).failed_count, 'canceled_count', (batch).canceled_count,
        'created_at', (batch).created_at, 'started_at', (batch).started_at, 'completed_at', (batch).completed_at
    )
$function$;
