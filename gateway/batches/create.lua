-- Writes down a batch, unless its tenant has as many open as it may have. Repeating it changes nothing.
-- KEYS: batch, work, all, open. ARGV: id, most that may be open, seconds of its window, then fields and values.
-- Returns the fields of the batch; none: there are too many.

local job, work, all, open = unpack(KEYS)
if redis.call('EXISTS', job) == 0 then
  if redis.call('SCARD', open) >= tonumber(ARGV[2]) then
    return {}
  end
  local now = clock()
  local expires_at = math.floor(now / 1000000) + tonumber(ARGV[3])
  redis.call('HSET', job, 'status', 'validating', 'created_at', seconds(now), 'expires_at', exact(expires_at),
    unpack(ARGV, 4))
  redis.call('ZADD', work, 0, 'validate')
  redis.call('ZADD', all, exact(now), ARGV[1])
  redis.call('SADD', open, ARGV[1])
end
return redis.call('HGETALL', job)
