-- Creates a batch and its `validate` task, unless its tenant has too many open batches. Repeating the call changes
-- nothing.
-- KEYS: batch, work, all, open. ARGV: id, maximum number of open batches, seconds of its window, then fields and
-- values.
-- Returns the fields of the batch, or nothing if the tenant has too many.

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
