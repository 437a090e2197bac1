-- What is in the Troubleshooting Queue of a domain, grouped by type and error, the largest group first. Absent error types
-- and codes are ''. At most `at_most` commands are counted, type by type, and 201 groups answered: `more` says that there are
-- other commands.
CREATE OR REPLACE FUNCTION commandbus.troubled_groups(domain text, at_most integer DEFAULT 100000)
RETURNS TABLE (
    command_type text,
    error_type text,
    error_code text,
    commands bigint,
    first_at timestamptz,
    last_at timestamptz,
    sample_id uuid,
    sample_message text,
    more boolean
)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    WITH troubled AS MATERIALIZED (
        -- (One index has this order, and the row lets it begin and end at the domain.)
        SELECT c.id, c.command_type, coalesce(c.last_error_type, '') AS error_type,
               coalesce(c.last_error_code, '') AS error_code, c.updated_at
        FROM public.command_bus_command c
        WHERE (c.rare_status, c.domain) >= ('IN_TROUBLESHOOTING_QUEUE', troubled_groups.domain)
          AND (c.rare_status, c.domain) <= ('IN_TROUBLESHOOTING_QUEUE', troubled_groups.domain)
          AND c.rare_status IS NOT NULL
        ORDER BY c.rare_status DESC, c.domain DESC, c.command_type DESC, c.id DESC
        LIMIT troubled_groups.at_most + 1
    )
    SELECT g.command_type, g.error_type, g.error_code, g.commands, g.first_at, g.last_at,
           s.command_id, s.last_error_msg, (SELECT count(*) > troubled_groups.at_most FROM troubled)
    FROM (
        SELECT t.command_type, t.error_type, t.error_code, count(*) AS commands,
               min(t.updated_at) AS first_at, max(t.updated_at) AS last_at, max(t.id) AS newest
        FROM troubled t
        GROUP BY t.command_type, t.error_type, t.error_code
        ORDER BY commands DESC, newest DESC
        LIMIT 201
    ) AS g
    JOIN public.command_bus_command s ON s.id = ANY (ARRAY[g.newest])
    ORDER BY g.commands DESC, g.newest DESC
$function$;
