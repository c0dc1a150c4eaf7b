-- Ends a batch as failed. One that was cancelled while it was validated is finalized instead, and one that was
-- cancelled and cannot be finalized ends as cancelled.
-- KEYS: batch, work, holders, open, and outbox if the tenant is notified. ARGV: task, fence, errors.
-- Returns 1, or 0 if the lease is lost.

local job, work, holders, open, outbox = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
local is_cancelled = redis.call('HGET', job, 'status') == 'cancelling'
if is_cancelled and ARGV[1] == 'validate' then
  turn_to('validate', work, holders)
  return 1
end
redis.call('HSET', job, 'errors', ARGV[3])
close(job, work, holders, open, outbox, is_cancelled and 'cancelled' or 'failed', clock())
return 1
