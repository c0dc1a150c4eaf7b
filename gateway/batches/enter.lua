-- Enters a batch in the index, before there is one. KEYS: index. ARGV: entry, seconds of its window.

return redis.call('ZADD', KEYS[1], seconds(clock() + tonumber(ARGV[2]) * 1000000), ARGV[1])
