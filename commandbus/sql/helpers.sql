-- Raised errors carry an SQLSTATE of class CB, so that callers can tell them from PostgreSQL's own:
-- CB001 unknown domain, CB002 bad input, CB003 isolation level, CB004 unknown queue, CB005 unknown batch, CB006 not in
-- this state of a batch, CB007 sent before as part of something else (detail: domain and id), CB008 not in this state of a
-- Spark job.

CREATE OR REPLACE FUNCTION commandbus.require_domain(domain text)
RETURNS public.command_bus_domain
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _domain public.command_bus_domain;
BEGIN
    SELECT d.* INTO _domain FROM public.command_bus_domain d WHERE d.name = require_domain.domain;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB001',
            MESSAGE = format(
                'domain %L is not registered; known: %s',
                require_domain.domain,
                coalesce((SELECT string_agg(d.name, ', ' ORDER BY d.name) FROM public.command_bus_domain d), 'none')
            ),
            HINT = 'Add it to COMMANDBUS["DOMAINS"] or write a handler for it, then run: manage.py commandbus_setup';
    END IF;
    RETURN _domain;
END;
$function$;

-- The queue of a domain: that of its commands, or, if it stands for a reply queue, that one.
CREATE OR REPLACE FUNCTION commandbus.queue_of(domain text)
RETURNS text
LANGUAGE sql
STABLE
AS $function$
    SELECT d.queue_name FROM public.command_bus_domain AS d WHERE d.name OPERATOR(pg_catalog.=) domain
$function$;

-- The rows of commands, in the order of the ids; null where there is none.
--
-- A plan that was made while the table was small may walk the whole domain for each command once it is large, and
-- sessions keep their plans. Order and limit leave only one index to choose: with another one, there would be a sort. So
-- it is also where PostgreSQL counts on no rows at all, after an ANALYZE of a table that was pruned.
--
-- For the same reason others
--   - look rows up by `id = ANY (ARRAY[…])`: after `id = …`, or with an order by the row's own id, a walk along the whole
--     index would be a way to join, and seem the cheapest; so would it after [NOT] EXISTS, but not after a subquery that
--     gives a value;
--   - look the second column of an index up by BETWEEN: before PostgreSQL 17, an ANY there may be left to a filter;
--   - compare the domain of what they find by its id by IS NOT DISTINCT FROM, which tempts no index on the domain.
CREATE OR REPLACE FUNCTION commandbus.rows_of(domain text, command_ids uuid[])
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $function$
BEGIN
    RETURN ARRAY(
        SELECT k.id
        FROM unnest(rows_of.command_ids) WITH ORDINALITY AS w(command_id, ordinal)
        LEFT JOIN LATERAL (
            SELECT c.id FROM public.command_bus_command c
            WHERE c.domain = rows_of.domain AND c.command_id BETWEEN w.command_id AND w.command_id
            ORDER BY c.command_id
            LIMIT 1
        ) AS k ON true
        ORDER BY w.ordinal
    );
END;
$function$;

-- Every transition reads in one statement what an earlier one has waited for. That needs a snapshot per statement.
CREATE OR REPLACE FUNCTION commandbus.require_read_committed()
RETURNS void
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'CB003',
            MESSAGE = format(
                'commandbus needs the isolation level READ COMMITTED; this transaction runs in %s',
                upper(current_setting('transaction_isolation'))
            ),
            HINT = 'Call it in a transaction of its own, or set the isolation level of this database to READ COMMITTED';
    END IF;
END;
$function$;

-- Sends each reply to the queue at the same place of the other array, one PGMQ call per queue, and wakes a worker that
-- waits for it. (In the transaction: it costs only those who finish something while such a worker is idle.)
CREATE OR REPLACE FUNCTION commandbus.send_replies(queues text[], replies jsonb[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    _queue text;
BEGIN
    FOR _queue IN SELECT DISTINCT q FROM unnest(send_replies.queues) AS q WHERE q IS NOT NULL LOOP
        PERFORM pgmq.send_batch(
            _queue,
            ARRAY(SELECT r.reply FROM unnest(send_replies.queues, send_replies.replies) AS r(queue, reply) WHERE r.queue = _queue)
        );
        PERFORM commandbus.wake(_queue);
    END LOOP;
END;
$function$;

-- The reply of a command that has ended, as the application reads it from the reply queue; null of others. What it says
-- beyond the command's own columns is kept in `answer`. It has no SET clause, so that PostgreSQL can inline it, and names
-- pg_catalog itself instead.
CREATE OR REPLACE FUNCTION commandbus.reply_of(command public.command_bus_command)
RETURNS jsonb
LANGUAGE sql
STABLE
AS $function$
    SELECT CASE WHEN (command).status IN ('COMPLETED', 'FAILED', 'CANCELED') THEN pg_catalog.jsonb_build_object(
        'command_id', (command).command_id,
        'correlation_id', (command).correlation_id,
        'domain', (command).domain,
        'type', (command).command_type OPERATOR(pg_catalog.||) 'Response',
        'outcome', CASE (command).status WHEN 'COMPLETED' THEN 'SUCCESS' ELSE (command).status END,
        'completed_at', (command).updated_at,
        'data', coalesce((command).answer OPERATOR(pg_catalog.->) 'data', '{}'::pg_catalog.jsonb),
        'error', (command).answer OPERATOR(pg_catalog.->) 'error'
    ) END
$function$;

-- What a reply says beyond its command's columns: null, if nothing. Most do not, and that keeps the row small.
CREATE OR REPLACE FUNCTION commandbus.answer_of(data jsonb, error jsonb)
RETURNS jsonb
LANGUAGE sql
IMMUTABLE
AS $function$
    SELECT CASE WHEN data IS NULL AND error IS NULL THEN NULL ELSE pg_catalog.jsonb_build_object(
        'data', coalesce(data, '{}'::pg_catalog.jsonb),
        'error', CASE WHEN error IS NULL THEN NULL ELSE pg_catalog.jsonb_build_object(
            'code', error OPERATOR(pg_catalog.->) 'code',
            'message', error OPERATOR(pg_catalog.->) 'message',
            'class', error OPERATOR(pg_catalog.->) 'type'
        ) END
    ) END
$function$;

-- The answer of an action on many commands. `refused` has one key per command that was found, and as its value the
-- reason why it was left alone, or null.
CREATE OR REPLACE FUNCTION commandbus.answer(domain text, command_ids uuid[], refused jsonb)
RETURNS TABLE (command_id uuid, done boolean, why text)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT DISTINCT
        i.command_id,
        coalesce(jsonb_typeof(answer.refused -> i.command_id::text) = 'null', false),
        CASE WHEN coalesce(answer.refused ? i.command_id::text, false)
             THEN answer.refused ->> i.command_id::text
             ELSE format('there is no such command in domain %s', answer.domain) END
    FROM unnest(answer.command_ids) AS i(command_id)
$function$;

-- Locks those of the commands that are in the Troubleshooting Queue, and only those: a refused action must not hold up a
-- worker. Two operators at once: the second waits here, and then finds nothing. With `msg_ids`, only those
-- that still have the message they had when the operator saw them: every retry makes a new one.
CREATE OR REPLACE FUNCTION commandbus.lock_troubled(domain text, command_ids uuid[], msg_ids bigint[])
RETURNS bigint[]
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
    WITH troubled AS MATERIALIZED (
        SELECT c.id
        FROM public.command_bus_command c
        WHERE c.id = ANY (commandbus.rows_of(lock_troubled.domain, lock_troubled.command_ids))
          AND c.status = 'IN_TROUBLESHOOTING_QUEUE'
          AND (lock_troubled.msg_ids IS NULL OR c.msg_id = ANY (lock_troubled.msg_ids))
        ORDER BY c.id
        FOR UPDATE
    )
    SELECT array_agg(t.id) FROM troubled t
$function$;

-- Why an operator's action leaves a command alone that lock_troubled has not locked.
CREATE OR REPLACE FUNCTION commandbus.why_not(status text)
RETURNS text
LANGUAGE sql
IMMUTABLE
AS $function$
    SELECT CASE status WHEN 'IN_TROUBLESHOOTING_QUEUE' THEN 'it was retried since it was chosen, and has failed again'
                       ELSE pg_catalog.format('its status is %s', status) END
$function$;

-- An error as it is stored: its text may be of any length. (Errors of handlers are cut in Python, with their traceback.)
-- No SET clause, so that PostgreSQL can inline it.
CREATE OR REPLACE FUNCTION commandbus.cut_error(error jsonb)
RETURNS jsonb
LANGUAGE sql
STABLE
AS $function$
    SELECT CASE
        WHEN pg_catalog.length(error OPERATOR(pg_catalog.->>) 'message') OPERATOR(pg_catalog.>) 10000
        THEN error OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object(
            'message', pg_catalog.format(
                '%s… [cut: %s characters]', pg_catalog.left(error OPERATOR(pg_catalog.->>) 'message', 9900),
                pg_catalog.length(error OPERATOR(pg_catalog.->>) 'message')))
        ELSE error
    END
$function$;
