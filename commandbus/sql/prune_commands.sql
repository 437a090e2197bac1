-- Removes up to `qty` resolved commands of a domain that were last changed before `before`, with their archived payloads
-- and messages. What stays is the audit, and of each command a tombstone, put in the same transaction: `commandbus.send`
-- finds either the command or its tombstone, never neither. Answers how many it removed.
--
-- Commands of a batch stay until the whole batch completed before `before`: it counts them.
--
-- It waits for nobody. A locked row is left for a later call, so two prunes at once share the work, and nobody who waits
-- for a prune can be waited for.
--
-- No index tells which commands are resolved and since when: it would cost every status change its HOT update. The BRIN
-- index on updated_at does not help either, for new rows fill the pages that a prune has emptied. But ids grow with time.
-- So each type of the domain is walked by its ids, up to the first command that is younger than `before`. The walk passes
-- over old commands that it must leave, and over nothing else.
CREATE OR REPLACE FUNCTION commandbus.prune_commands(domain text, before timestamptz, qty integer)
RETURNS integer
LANGUAGE plpgsql
STRICT
SET search_path = pg_catalog, pg_temp
-- Only ix_command_bus_command_type has the order of the walk; nothing may be read in another order and sorted.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
DECLARE
    _command record;
    _type text;
    _done_type text := '';
    _rows bigint[] := '{}';
    _ids uuid[];
    _msg_ids bigint[];
BEGIN
    PERFORM commandbus.require_read_committed();
    PERFORM commandbus.require_domain(prune_commands.domain);

    <<types>>
    LOOP
        _type := NULL;
        FOR _command IN
            SELECT c.id, c.command_type, c.status, c.batch_id, c.created_at, c.updated_at
            FROM public.command_bus_command c
            WHERE c.domain = prune_commands.domain AND c.command_type > _done_type
              AND c.domain >= ''  -- the condition of the index
            ORDER BY c.command_type, c.id
        LOOP
            _type := coalesce(_type, _command.command_type);
            EXIT types WHEN cardinality(_rows) >= prune_commands.qty;
            EXIT WHEN _command.command_type <> _type OR _command.created_at >= prune_commands.before;
            CONTINUE WHEN _command.batch_id IS NOT NULL AND (
                SELECT b.completed_at < prune_commands.before
                FROM public.command_bus_batch b
                WHERE b.batch_id = _command.batch_id
            ) IS NOT TRUE;
            IF _command.status IN ('COMPLETED', 'FAILED', 'CANCELED') AND _command.updated_at < prune_commands.before THEN
                PERFORM FROM public.command_bus_command c WHERE c.id = _command.id FOR UPDATE SKIP LOCKED;
                IF FOUND THEN
                    _rows := array_append(_rows, _command.id);
                END IF;
            END IF;
        END LOOP;
        EXIT WHEN _type IS NULL;
        _done_type := _type;
    END LOOP;

    WITH pruned AS (
        DELETE FROM public.command_bus_command c
        WHERE c.id = ANY (_rows)
        RETURNING c.command_id, c.msg_id, c.content_hash, c.unique_globally
    ), buried AS (
        INSERT INTO public.command_bus_tombstone (domain, command_id, content_hash, unique_globally, pruned_at)
        SELECT prune_commands.domain, p.command_id, p.content_hash, p.unique_globally, clock_timestamp()
        FROM pruned p
        ON CONFLICT DO NOTHING
    )
    SELECT array_agg(p.command_id), array_agg(p.msg_id) INTO _ids, _msg_ids FROM pruned p;

    DELETE FROM public.command_bus_payload_archive a
    WHERE a.id = ANY (ARRAY(
        SELECT p.id
        FROM unnest(_ids) AS i(command_id)
        CROSS JOIN LATERAL (
            SELECT p.id FROM public.command_bus_payload_archive p
            WHERE p.domain = prune_commands.domain AND p.command_id = i.command_id
            LIMIT 1
        ) AS p
    ));
    -- PGMQ has no function that deletes from its archive.
    EXECUTE format('DELETE FROM pgmq.%I AS a WHERE a.msg_id = ANY ($1)', 'a_' || commandbus.queue_of(prune_commands.domain))
    USING _msg_ids;
    RETURN cardinality(_rows);
END;
$function$;
