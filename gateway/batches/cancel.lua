-- No more lines of a batch are to be begun. KEYS: batch. Returns its fields; none: there is no such batch.

local job = KEYS[1]
local status = redis.call('HGET', job, 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', job, 'status', 'cancelling', 'cancelling_at', seconds(clock()))
end
return redis.call('HGETALL', job)
