-- Forgets a batch that nobody has begun to work on. KEYS: batch, work, holders, all, open. ARGV: id.
-- Returns 1; 0: somebody has.

local job, work, holders, all, open = unpack(KEYS)
if redis.call('EXISTS', holders) == 1 or redis.call('HGET', job, 'status') ~= 'validating' then
  return 0
end
redis.call('DEL', job, work)
redis.call('ZREM', all, ARGV[1])
redis.call('SREM', open, ARGV[1])
return 1
