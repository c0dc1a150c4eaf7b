-- Adds a batch to the index, before the batch is created. KEYS: index. ARGV: entry, seconds of its window.

return redis.call('ZADD', KEYS[1], seconds(clock() + tonumber(ARGV[2]) * 1000000), ARGV[1])
