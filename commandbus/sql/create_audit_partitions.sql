-- Makes the audit's partitions for this month and the `ahead` following ones. Safe to repeat. Rows that the default
-- partition took meanwhile move to where they belong. LIKE + ATTACH, because CREATE … PARTITION OF locks the parent
-- against all writers.
CREATE OR REPLACE FUNCTION commandbus.create_audit_partitions(ahead integer DEFAULT 2)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET lock_timeout = '3s'
AS $function$
DECLARE
    _month timestamptz;
    _suffix text;
    _made integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('commandbus.create_audit_partitions', 0));
    FOR _month IN
        SELECT date_trunc('month', clock_timestamp()) + make_interval(months => n)
        FROM generate_series(0, create_audit_partitions.ahead) AS n
    LOOP
        _suffix := to_char(_month, 'YYYY_MM');
        IF to_regclass('public.command_bus_audit_p' || _suffix) IS NULL THEN
            EXECUTE format(
                'CREATE TABLE public.command_bus_audit_p%s '
                '(LIKE public.command_bus_audit INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
                _suffix);
            IF EXISTS (
                SELECT FROM public.command_bus_audit_default AS a
                WHERE a.ts >= _month AND a.ts < _month + interval '1 month'
            ) THEN
                LOCK TABLE public.command_bus_audit_default IN ACCESS EXCLUSIVE MODE;
                EXECUTE format(
                    $query$
                        WITH moved AS (
                            DELETE FROM public.command_bus_audit_default WHERE ts >= $1 AND ts < $2 RETURNING *
                        )
                        INSERT INTO public.command_bus_audit_p%s SELECT * FROM moved
                    $query$, _suffix)
                USING _month, _month + interval '1 month';
            END IF;
            EXECUTE format(
                'ALTER TABLE public.command_bus_audit ATTACH PARTITION public.command_bus_audit_p%s '
                'FOR VALUES FROM (%L) TO (%L)',
                _suffix, _month, _month + interval '1 month');
            _made := _made + 1;
        END IF;
    END LOOP;
    RETURN _made;
END;
$function$;
