-- Forgets what is in use in one scope. What runs goes on running, and is not corrected here when it is settled.
-- KEYS: bucket. ARGV: milliseconds to remember that for.

local time = redis.call('TIME')
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'epoch', time[1] .. '.' .. time[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
