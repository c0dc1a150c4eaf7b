-- Cancels a batch that is not finalizing and has not ended: no more of its lines begin.
-- KEYS: batch. Returns the fields of the batch, or nothing if there is no such batch.

local job = KEYS[1]
local status = redis.call('HGET', job, 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', job, 'status', 'cancelling', 'cancelling_at', seconds(clock()))
end
return redis.call('HGETALL', job)
