-- Reads a page of the index, the earliest deadlines first. KEYS: index. ARGV: first and last rank.
-- Returns {now in microseconds, entries, each followed by its deadline}.

return { exact(clock()), redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES') }
