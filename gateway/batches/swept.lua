-- Deletes the working keys of a batch that has ended, and lets its record expire. Of its tenant's batches, so many of
-- the newest are remembered (see ARGV); of the OLD_AT_ONCE oldest beyond them, records of swept ones are deleted now.
-- KEYS: batch, work, holders, bits, parts, all.
-- ARGV: task, fence, milliseconds until the record expires, id, how many are remembered. Returns 1, or 0 if the lease
-- is lost.

local OLD_AT_ONCE = 1000

local job, work, holders, bits, parts, all = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
redis.call('DEL', work, holders, bits, parts)
redis.call('PEXPIRE', job, ARGV[3])
local before_id = string.sub(job, 1, #job - #ARGV[4])
local old = math.min(redis.call('ZCARD', all) - tonumber(ARGV[5]), OLD_AT_ONCE)
for _, id in ipairs(old > 0 and redis.call('ZRANGE', all, 0, old - 1) or {}) do
  local record = before_id .. id
  if redis.call('PTTL', record) ~= -1 then
    redis.call('DEL', record)
    redis.call('ZREM', all, id)
  end
end
return 1
