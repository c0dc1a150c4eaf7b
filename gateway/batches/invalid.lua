-- A batch has failed, unless it is being cancelled. KEYS: batch, work, holders, open, outbox or none. ARGV: task, fence, errors.
-- Returns 1; 0: the lease is lost.

local job, work, holders, open, outbox = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
if redis.call('HGET', job, 'status') == 'cancelling' then
  turn_to('validate', work, holders)
  return 1
end
redis.call('HSET', job, 'errors', ARGV[3])
close(job, work, holders, open, outbox, 'failed', clock())
return 1
